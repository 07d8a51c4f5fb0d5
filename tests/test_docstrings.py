"""Docstrings, which are plain text, become reStructuredText in the documentation."""

import importlib.util
import pathlib

import pytest

PATH = pathlib.Path(__file__).parents[1] / "docs" / "docstrings.py"
SPEC = importlib.util.spec_from_file_location("docstrings", PATH)
docstrings = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docstrings)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("A *b* c*d |x| e_ `f_`.", "A *b* c\\*d \\|x\\| e\\_ `f_`."),
        ("Two `X`s, `a\nb`.", "Two `X`\\ s, `a\nb`."),
        ("As:\n\n    x <- |y|\n\nAnd.", "As:\n\n::\n\n    x <- |y|\n\nAnd."),
        ("As:\n\n== ==\na  b\n\n|", "As:\n\n::\n\n    == ==\n    a  b\n    \n\\|"),
        ("As:\n\n```yaml\na: *b\n```", "As:\n\n\n.. code-block:: yaml\n\n    a: *b\n"),
        ("Args:\n  x: one\n    |two|.", "Args:\n  x: one\n    \\|two\\|."),
        ("Of $x_i$,\n$a\n b$.", "Of :math:`x_i`,\n:math:`a\n b`."),
        ("As:\n\n$$\na * b\n$$\n\nA", "As:\n\n\n.. math::\n\n    a * b\n\n\nA"),
        ("For $5 and $HOME.", "For $5 and $HOME."),
        ("**Of two**, a*b: K.\nK.", "**Of two**, a\\*b: K\\.\nK\\."),
        ("And --steps=8, a--b.", "And ``--steps=8``, a--b."),
        ("Defaults: 1.", "\n**Defaults:** 1."),
        (
            "See arXiv 2311.08105.",
            "See `arXiv 2311.08105 <https://arxiv.org/abs/2311.08105>`__.",
        ),
    ],
)
def test_docstrings_become_restructured_text(before, after):
    lines = before.split("\n")
    docstrings.process(None, "module", "name", None, None, lines)
    assert "\n".join(lines) == after
