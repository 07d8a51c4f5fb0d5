"""Texts of the repository about its files are true.

- A Markdown file that any text names is in the repository, or a program writes it.
- So is every path that begins with one of the repository's top-level folders.
- Nothing points out of the repository, to a folder beside it.
- README has the command that CI takes from it.
- The changelog stays short.
"""

import fnmatch
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".sh", ".sbatch"}
FOLDERS = ("cocodc_jax", "docs", "experiments", "tests", r"\.ci")

# A name without a folder: what comes before must not make it part of a longer path.
MARKDOWN = re.compile(r"(?<![\w./*{}$-])[\w-]+\.md\b")
# A path is cut before the full stop, colon or bracket that ends the sentence.
PATH = re.compile(rf"(?<![\w./{{}}$-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w/*]")
# Where a program makes or reads a file of that name, the name stands in quotes alone.
WRITTEN = re.compile(r"""["']([\w-]+\.md)["']""")
# In two parts, so that this file does not contain it.
OUTSIDE = ".." + "/shared"


def tracked_files():
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return listed.split("\0")[:-1]


def texts(files):
    """Return the text of every tracked text file that exists, by name."""
    is_text = lambda f: pathlib.Path(f).suffix in SUFFIXES or f.startswith(".ci/")  # noqa: E731
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in files
        if is_text(name) and (ROOT / name).is_file()
    }


def written_names(text_of):
    """Return the Markdown names that programs write: `folder / "name"` in Python."""
    sources = (text for name, text in text_of.items() if name.endswith(".py"))
    return {name for text in sources for name in WRITTEN.findall(text)}


def missing_markdown(text, files, written):
    """Return the Markdown names of a text that no file and no program has."""
    known = {pathlib.PurePosixPath(f).name for f in files} | written
    return sorted({name for name in MARKDOWN.findall(text) if name not in known})


def known_paths(files):
    """Return files and the folders that they are in."""
    return {*files, *(str(p) for f in files for p in pathlib.PurePosixPath(f).parents)}


def missing_paths(text, known):
    """Return the paths of a text that are neither known nor a pattern of some."""
    return sorted(
        path
        for path in set(PATH.findall(text))
        if path.rstrip("/") not in known and not fnmatch.filter(known, path)
    )


FILES = tracked_files()
TEXTS = texts(FILES)
WRITTEN_NAMES = written_names(TEXTS)
# The build of the documentation writes a page for each file of methods.
WRITTEN_NAMES |= {f"{p.stem}.md" for p in (ROOT / "cocodc_jax/methods").rglob("*.py")}


def test_texts_name_only_files_that_are_here():
    known = known_paths(FILES)
    missing_of = {}

    for name, text in TEXTS.items():
        missing = missing_markdown(text, FILES, WRITTEN_NAMES)
        missing += missing_paths(text, known)
        missing += [OUTSIDE] * (OUTSIDE in text)
        if missing:
            missing_of[name] = missing

    assert not missing_of, f"texts name what the repository does not have: {missing_of}"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see {no}.md, section 4.1", ["{no}.md"]),
        ("see README.md; the run writes made.md", []),
        ("WORKDIR/{no}.md and {{dir}}/{no}.md are a run's", []),
        ("`{tests}/{no}.py`.", ["{tests}/{no}.py"]),
        ("{tests}/data/one.py, ({tests}/data), {tests}/data/one.py:3.", []),
        ("{tests}/d*, {tests}/**, {tests}/data/", []),
        ("{tests}/data/{no}_*", ["{tests}/data/{no}_*"]),
        ("WORKDIR/{tests}/x.py, config.json, ../{tests}/x.py, -m {tests}.data", []),
    ],
)
def test_missing_files_are_found_in_texts(text, missing):
    # Filled in here, so that the test above does not find them in this file.
    fill = {"no": "lost", "tests": "tests"}
    files = ["README.md", "{tests}/data/one.py".format(**fill)]
    text = text.format(**fill)
    named = missing_markdown(text, files, {"made.md"})
    named += missing_paths(text, known_paths(files))
    assert named == [name.format(**fill) for name in missing]


def test_ci_finds_the_test_command_in_the_readme():
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    search = next(line for line in lines if line.startswith("command=$(grep"))
    # As in CI, whose script ends if the search finds nothing.
    script = search.removesuffix(" || {") + ' && echo "$command"'
    command = subprocess.check_output(["bash", "-c", script], cwd=ROOT, text=True)
    assert command.split("#")[0].strip() == "pip install -e '.[dev]' && pytest"


def test_a_version_has_ten_lines_in_the_changelog():
    text = (ROOT / "docs/changelog.md").read_text(encoding="utf-8")
    _, *versions = re.split(r"^## ", text, flags=re.MULTILINE)
    assert versions

    num_lines = {}
    for section in versions:
        heading, *lines = filter(str.strip, section.splitlines())
        num_lines[heading] = len(lines)
    assert {name: n for name, n in num_lines.items() if n > 10} == {}


def test_the_lists_of_texts_and_files_are_not_empty():
    assert "README.md" in TEXTS
    assert "tests/test_repository.py" in FILES
