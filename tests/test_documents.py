"""The code in README, CONTRIBUTING and docs runs unchanged, and first pages are short.

Pages of docs that are notebooks (`{code-cell}`) are executed when the site is built.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def tracked(*patterns):
    """Return tracked files, which are those that no build writes."""
    listed = ("git", "ls-files", *patterns)
    return subprocess.check_output(listed, cwd=ROOT, text=True).split()


def blocks_of(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def num_lines(block):
    return len([line for line in block.splitlines() if line.strip()])


PAGES = ["README.md", "CONTRIBUTING.md", *tracked("docs/*.md")]
BLOCKS = {f"{page}:{i}": b for page in PAGES for i, b in enumerate(blocks_of(page))}
# Pages about earlier versions.
PAST = ("docs/changelog.md", "docs/changelog_archive.md", "docs/results/archive")
FILES = tracked("cocodc_jax/*.py", "experiments/*.py", "pyproject.toml")
CODE = "\n".join((ROOT / file).read_text() for file in FILES)
WORDS = re.sub(r'"\s*(?:\n\s*)?f?r?"', "", CODE)  # With long strings in one piece.
TROUBLE = (ROOT / "docs/guides/troubleshooting.md").read_text()
MESSAGES = [x for x in re.findall(r"^\| `([^`]+)`", TROUBLE, re.M) if " " in x]
LIBRARY = "README.md:0"
LOSS, LINEN, EQUINOX, PROCESSES = (f"docs/start/own_loss.md:{i}" for i in range(4))
OWN, TRANSFORM, GALLERY, LOOP = (f"docs/start/own_loop.md:{i}" for i in range(4))
METHOD = "docs/start/own_method.md:0"
CHECKPOINTS = "docs/guides/checkpoints.md:0"
# Blocks that run in one process, one after another: those that everybody opens first,
# and those of the guides.
FIRST = [name for name in BLOCKS if not name.startswith("docs/")]
GUIDES = [name for name in BLOCKS if name.startswith("docs/") and name != PROCESSES]


def start_code(block, folder, **variables):
    """Run a block as a script, in a folder outside of the checkout."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    # Other processes write to the cache of compiled programs meanwhile.
    half_written = "ignore:Error reading persistent compilation"
    words = [sys.executable, "-W", "error", "-W", half_written, "-c", block]
    return subprocess.Popen(words, cwd=folder, env=environment, text=True, **pipes)


def output_of(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


# Runs blocks one after another, each with names and devices of its own: to import what
# they need takes longer than most of them.
IN_TURN = """
import contextlib, io, json, sys, traceback
import jax, jax.extend.backend

for block in json.load(sys.stdin):
    out, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(block, "block", "exec"), {"__name__": "__main__"})
    except Exception:
        error = traceback.format_exc()
    print(json.dumps([out.getvalue(), error]), flush=True)
    jax.clear_caches()
    jax.extend.backend.clear_backends()
"""


def outcomes_of(names, folder):
    """Return the output of each block, and its error."""
    process = start_code(IN_TURN, folder)
    blocks = json.dumps([BLOCKS[name] for name in names])
    out, error = process.communicate(blocks, timeout=300)
    outcomes = [json.loads(line) for line in out.splitlines()]
    assert len(outcomes) == len(names), error
    return dict(zip(names, outcomes, strict=True))


@pytest.fixture(scope="module")
def of_first(tmp_path_factory):
    return outcomes_of(FIRST, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def of_guides(tmp_path_factory):
    return outcomes_of(GUIDES, tmp_path_factory.mktemp("guides"))


def test_first_blocks_and_recipes_are_short():
    assert {LIBRARY, GALLERY, LOOP, METHOD, PROCESSES} <= BLOCKS.keys()
    longest = {LIBRARY: 25, LOSS: 40, CHECKPOINTS: 40, TRANSFORM: 40}
    assert not [name for name, n in longest.items() if num_lines(BLOCKS[name]) > n]
    recipes = blocks_of("CONTRIBUTING.md")
    assert len(recipes) == 6
    assert max(map(num_lines, recipes)) < 30


@pytest.mark.parametrize(
    ("name", "longest"), [("README.md", 150), ("BUILD_NOTES.md", 350)]
)
def test_first_documents_are_short(name, longest):
    assert len((ROOT / name).read_text().splitlines()) <= longest


def test_citations_name_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{version}}}," in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", [p for p in PAGES if not p.startswith(PAST)])
def test_files_and_classes_that_a_page_names_exist(name):
    """Files, by their paths in the repository or a package, and classes."""
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    quoted = set(re.findall(r"`([^`\n]+)`", text))
    paths = [
        x for x in quoted if re.fullmatch(r"[a-z][\w./-]*/[\w.-]+\.(py|toml|md)", x)
    ]
    packages = [ROOT, ROOT / "cocodc_jax", ROOT / "experiments"]
    assert not [x for x in paths if not any((p / x).exists() for p in packages)]
    classes = {x for x in quoted if re.fullmatch(r"([A-Z][a-z]+){2,}", x)}
    assert not {x for x in classes if x not in CODE}


def test_names_in_contributings_table_are_in_their_files():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Where is ...\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 8

    for row in rows:
        quoted = re.findall(r"`([^`]+)`", row)
        sources = [(ROOT / name).read_text() for name in quoted if name.endswith(".py")]
        for name in quoted:
            if re.fullmatch(r"\w+", name):
                assert re.search(rf"\b{name}\b", "\n".join(sources)), name


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_that_are_explained_are_of_the_code(message):
    for part in re.split(r"\.\.\.", message):
        assert part.strip(" '\"():[]`=") in WORDS, part


@pytest.mark.parametrize("name", FIRST)
def test_blocks_of_first_documents_run(name, of_first):
    assert_runs(name, *of_first[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_block_of_a_guide_runs(name, of_guides):
    assert_runs(name, *of_guides[name])


def assert_runs(name, printed, error):
    """Check that a block has not failed and has printed the output of its page."""
    assert error is None, error
    words = [line.split() for line in printed.splitlines()]

    # The loss that is printed first; of the library it is 1 before the first step.
    highest = {LIBRARY: 0.3, EQUINOX: 0.3, TRANSFORM: 1e-2}
    assert name not in highest or float(words[0][0]) < highest[name], printed

    if name == LOSS:
        assert max(float(line[1]) for line in words) < 0.3, printed

    if name == LINEN:
        assert [line[0] for line in words] == ["20", "40", "60"]
        assert float(words[-1][1]) < 0.5, printed

    if name == CHECKPOINTS:
        assert "schedule" in printed
        assert "inner optimizer" not in printed

    if name == OWN:  # Ten messages of four numbers.
        assert "'bytes_sent': Array(160." in printed

    if name == LOOP:
        assert words[-1][0] == "40"


@pytest.mark.slow
def test_the_script_with_checkpoints_goes_on(tmp_path):
    whole = output_of(start_code(BLOCKS[LINEN], tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "60")  # The last two are kept.
    # Its batches are drawn again, so that the numbers may differ.
    again = output_of(start_code(BLOCKS[LINEN], tmp_path))
    steps = [[line.split()[0] for line in x.splitlines()] for x in (whole, again)]
    assert steps == [["20", "40", "60"], ["60"]]


def test_the_script_for_processes_does_the_same_as_two(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = {
        "COCODC_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "COCODC_NUM_PROCESSES": "2",
    }

    alone = start_code(BLOCKS[PROCESSES], tmp_path)
    both = [
        start_code(BLOCKS[PROCESSES], tmp_path, COCODC_PROCESS_ID=str(i), **cluster)
        for i in range(2)
    ]
    printed = [output_of(process) for process in (alone, *both)]

    # What the collectives say of themselves has no such number, and may be anywhere.
    numbers = [re.findall(r"\d+\.\d+", text) for text in printed]
    assert numbers[0] == numbers[1] == numbers[2] != []
