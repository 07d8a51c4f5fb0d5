"""Documents, docstrings, errors and help use the field's words."""

import ast
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "BUILD_NOTES.md"]
LISTED = ["git", "ls-files", "docs/*.md"]  # Without those that the build writes.
DOCUMENTS += subprocess.check_output(LISTED, cwd=ROOT, text=True).split()
# Packages, and programs with their modules.
PACKAGES = sorted(path.parent for path in (ROOT / "cocodc_jax").glob("[a-z]*/*.py"))
PACKAGES = [*dict.fromkeys(PACKAGES), ROOT / "experiments"]

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
PATTERN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)


def prose(text):
    """Drop code, whose names are what they are."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"^    \S.*$|^ +\w+:", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "", text)


def found(text):
    return [" ".join(word.split()) for word in PATTERN.findall(prose(text))]


def texts(package):
    """Yield public docstrings, and strings of words: errors, help, what is printed."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        place = path.relative_to(ROOT)
        docstrings = set()

        for node in ast.walk(tree):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                docstrings |= set(ast.iter_child_nodes(node.body[0]))
                name = getattr(node, "name", "module")
                if name[0] != "_":
                    yield f"{place}: {name}", text

        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in docstrings:
                if isinstance(node.value, str) and " " in node.value:
                    yield f"{place}:{node.lineno}", node.value


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_no_riddling_phrase(name):
    assert not found((ROOT / name).read_text()), f"instead of these use {WORDS}"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_docstrings_errors_and_help_have_no_riddling_phrase(package):
    hits = [(place, found(text)) for place, text in texts(package)]
    assert not [hit for hit in hits if hit[1]], f"instead of these use {WORDS}"


def test_phrases_are_found_outside_of_code():
    assert found("What is told is alike; `told`, and\n```\nalike\n```") == [
        "What is told",
        "alike",
    ]
