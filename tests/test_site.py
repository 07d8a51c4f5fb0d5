"""Pages of results begin with their plot; a check of the built site finds faults."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import cache  # noqa: E402
import check_site  # noqa: E402

PAGES = sorted(
    path
    for path in (ROOT / "docs/results").glob("*.md")
    if path.stem not in ("index", "archive")
)
# A measured number: with decimals, or a percentage. Versions and flags do not count.
FIGURE = re.compile(r"(?<![\d.])\d+\.\d+(?:[eE]-?\d+)?(?!\.?\d)|\d+(?= %)")


def paragraphs(page):
    """Yield paragraphs and items of lists, without code, tables and headings."""
    text = page.read_text().partition("\n# ")[2]
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"^(\||#|:).*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|JAX [\d.]+|Python [\d.]+", "", text)
    yield from filter(None, re.split(r"\n\s*\n|\n- ", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_results_begins_with_its_plot(page):
    after = page.read_text().partition("\n# ")[2].partition("\n")[2].lstrip()
    assert re.match(r"```\{(code-cell|image)\}", after)
    first = after.partition("```\n")[0]
    plots = ("image", "frontier(", "losses(", "saved(", "bars(", "returns(")
    assert any(plot in first for plot in plots)
    bold = re.search(r"\*\*.+?\*\*", page.read_text(), re.S)
    assert bold, "the answer in bold"
    assert bold.start() > page.read_text().index(first[:40])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_paragraph_of_results_has_more_than_three_figures(page):
    many = {
        " ".join(paragraph.split()): figures
        for paragraph in paragraphs(page)
        if len(figures := FIGURE.findall(paragraph)) > 3
    }
    assert not many


def test_figures_of_a_paragraph_by_hand():
    assert FIGURE.findall("28 % of 0.13M in 480 steps, 1.552 ± 0.011") == [
        "28",
        "0.13",
        "1.552",
        "0.011",
    ]
    assert not FIGURE.findall("four regions, H 40, 1280 steps, 0.31.2")


@pytest.fixture
def site(tmp_path):
    (tmp_path / "guides").mkdir()
    (tmp_path / "one.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="guides/page.html#there">y</a>'
        '<a href="https://example.org/no">z</a><a href="#top">t</a>'
        '<img src="one.png"><table class="indextable"></table>'
        '<div class="pst-scrollable-table-container"><table></table></div>'
        '<div class="cell_output container"><div><pre>x</pre></div></div>'
    )
    (tmp_path / "guides/page.html").write_text(
        '<p id="there"><a href="../index.html">up</a></p>'
    )
    return tmp_path


def test_a_site_without_faults_has_none(site):
    assert list(check_site.problems(site)) == []


@pytest.mark.parametrize(("body", "problem"), [
    ('<a href="gone.html">x</a>', "index.html: gone.html is dead"),
    ('<a href="guides/page.html#no">x</a>',
     "index.html: guides/page.html#no has no such place"),
    ('<img src="two.png">', "index.html: two.png is missing"),
    ('<a href="mailto:WORKDIR@STEP">x</a>',
     "index.html: mailto:WORKDIR@STEP is an e-mail link"),
    ('<div class="highlight"></div><table></table>',
     "index.html: a <table> is in no box that scrolls"),
    ("<div><pre>x</pre></div>", "index.html: a <pre> is in no box that scrolls"),
])  # fmt: skip
def test_faults_of_a_site_are_found(site, body, problem, capsys, monkeypatch):
    (site / "index.html").write_text(body)
    assert list(check_site.problems(site)) == [problem]
    monkeypatch.setattr(sys, "argv", ["check_site.py", str(site)])
    assert check_site.main() == 1
    assert capsys.readouterr().err == f"{problem}\n"


def test_outputs_of_pages_are_kept_until_their_results_change(tmp_path):
    docs = tmp_path / "docs"
    results = tmp_path / "experiments/results"
    results.mkdir(parents=True)
    (results / "one.json").write_text("1")
    before = cache.folder(docs)
    before.mkdir(parents=True)
    assert cache.folder(docs) == before
    assert before.exists()

    (results / "one.json").write_text("2")
    assert cache.folder(docs) != before
    assert not before.exists()
