"""Documents and public docstrings use the field's words: no riddles of the house."""

import ast
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "BUILD_NOTES.md"]
LISTED = ["git", "ls-files", "docs/*.md"]  # Without those that the build writes.
DOCUMENTS += subprocess.check_output(LISTED, cwd=ROOT, text=True).split()
# Packages whose public docstrings pass; add yours when it does.
PACKAGES = [
    "compiled",
    "core",
    "data",
    "elastic",
    "exchange",
    "methods",
    "models",
    "netlab",
    "network",
]
PACKAGES += ["program", "report", "run", "sharding", "sync", "train", "transforms"]

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


def public_docstrings(package):
    """Yield the place and text of each public docstring, private modules left out."""
    for path in sorted((ROOT / "cocodc_jax" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                name = getattr(node, "name", "module")
                if name[0] != "_":
                    yield f"{path.relative_to(ROOT)}: {name}", text


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document(name):
    assert not found((ROOT / name).read_text()), f"instead of these use {WORDS}"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings(package):
    hits = {place: found(text) for place, text in public_docstrings(package)}
    assert not {p: h for p, h in hits.items() if h}, f"instead of these use {WORDS}"


def test_what_counts():
    assert found("What is told is alike; `told`, and\n```\nalike\n```") == [
        "What is told",
        "alike",
    ]
