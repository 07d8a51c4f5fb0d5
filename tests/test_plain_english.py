"""Documents, docstrings, errors, help, comments and names use the field's words."""

import ast
import io
import pathlib
import re
import subprocess
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "BUILD_NOTES.md"]
LISTED = ["git", "ls-files", "docs/*.md"]  # Without those that the build writes.
DOCUMENTS += subprocess.check_output(LISTED, cwd=ROOT, text=True).split()
# Packages, and programs with their modules.
PACKAGES = sorted(path.parent for path in (ROOT / "cocodc_jax").glob("[a-z]*/*.py"))
PACKAGES = [*dict.fromkeys(PACKAGES), ROOT / "experiments"]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# What to write in place of each.
WORDS = {
    r"told": "reported, passed",
    r"alike": "equal, replicated",
    r"(?:lies|lie) (?:on|in|over|at|beside|with|whole)": "is placed, is sharded",
    r"(?:is|are|was|at) at hand|at hand": "addressable, available",
    r"judged": "filtered, checked, evaluated",
    r"by turns": "interleaved, in turn",
    r"hearing|unheard": "failure detection",
    r"come[s]? to nothing|comes to": "reaches, amounts to",
    r"shall": "must, will",
    r"somebody|whoever": "the caller, a user",
    r"what is (?:told|said)": "what is reported",
    r"beside (?:its|the|their) (?:inner )?steps": "concurrently with",
}
# As well in comments, docstrings and names of tests.
RIDDLES = {
    r"anew": "again",
    r"nobody": "no region, no process",
    r"(?:can|could) be had|be had": "is supported",
    r"held against": "compared with",
    r"on (?:its|their) way|under way": "in flight, unfinished",
    r"who (?:is|has|was|does|asks|waits|joins|begins)": "a region that ...",
    r"what (?:is|was|cannot be|shall be)": "a noun: rows, flags, parameters",
}
# A name of a test begins with its subject.
OPENINGS = r"test (?:who|what|whoever|nor|and|so|it|they|those|of|if nobody)"


def words_in(text, *tables):
    """Return the words of the tables that a text has outside of code."""
    pattern = "|".join(word for table in tables for word in table)
    matches = re.findall(rf"\b(?:{pattern})\b", prose(text), re.IGNORECASE)
    return [" ".join(match.split()) for match in matches]


def prose(text):
    """Drop code, whose names are what they are."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^    \S.*$|^ +\w+:", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text)


def one_line(text):
    """Return prose in one line, so that phrases over two lines are found."""
    return " ".join(prose(text).split())


def strings_in(package):
    """Yield strings of words that are no docstrings: errors, help, printed text."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        place = path.relative_to(ROOT)
        docstrings = {node.body[0].value for node, _ in docstrings_of(tree)}

        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in docstrings:
                if isinstance(node.value, str) and " " in node.value:
                    yield f"{place}:{node.lineno}", node.value


def docstrings_of(tree):
    """Yield modules, classes and functions with their docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def comments_of(source):
    """Yield the line and the text of comments; lines below each other are one."""
    last = None
    first = 0
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != last + 1:
            yield first, "\n".join(lines)
            lines = []
        if not lines:
            first = token.start[0]
        lines.append(token.string.lstrip("# "))
        last = token.start[0]
    if lines:
        yield first, "\n".join(lines)


def riddles_in(paths, *tables):
    """Return the place and the words of comments and docstrings that have some."""
    hits = []
    for path in paths:
        source = path.read_text()
        docstrings = docstrings_of(ast.parse(source))
        lines = [(node.body[0].lineno, text) for node, text in docstrings]
        for line, text in (*lines, *comments_of(source)):
            if words := words_in(one_line(text), *tables):
                hits.append((f"{path.relative_to(ROOT)}:{line}", words))
    return hits


def names_of_tests(tree):
    """Yield the line and the words of the names of tests."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_no_riddling_phrase(name):
    text = (ROOT / name).read_text()
    assert not words_in(text, WORDS), f"instead of these use {WORDS}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_errors_and_help_have_no_riddling_phrase(package):
    hits = [(place, words_in(text, WORDS)) for place, text in strings_in(package)]
    assert not [hit for hit in hits if hit[1]], f"instead of these use {WORDS}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_comments_and_docstrings_have_no_riddling_phrase(package):
    hits = riddles_in(sorted(package.rglob("*.py")), WORDS)
    assert not hits, f"instead of these use {WORDS}"


def test_comments_and_docstrings_of_tests_have_no_riddling_phrase():
    hits = riddles_in(TESTS, WORDS, RIDDLES)
    assert not hits, f"instead of these use {WORDS | RIDDLES}"


def test_names_of_tests_begin_with_a_subject_and_have_no_riddling_phrase():
    hits = []
    for path in TESTS:
        for line, name in names_of_tests(ast.parse(path.read_text())):
            words = words_in(name, WORDS, RIDDLES)
            if words or re.match(rf"{OPENINGS}\b", name):
                hits.append((f"{path.relative_to(ROOT)}:{line}", name))
    assert not hits, f"instead of these use {WORDS | RIDDLES}, after a subject"


def test_phrases_are_found_outside_of_code():
    text = "What is told is alike; `told`, and\n```\nalike\n```"
    assert words_in(text, WORDS) == ["What is told", "alike"]


def test_comments_below_each_other_are_one_text():
    source = "x = 1  # One.\n\n# Two lines that\n# are one.\ny = 2\n"
    comments = [(1, "One."), (3, "Two lines that\nare one.")]
    assert list(comments_of(source)) == comments


def test_a_phrase_of_two_lines_of_a_comment_is_found():
    ((_, text),) = comments_of("# Copies are on\n# their way.\n")
    assert words_in(one_line(text), RIDDLES) == ["on their way"]
