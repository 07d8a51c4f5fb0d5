"""The page as Chromium lays it out: every column inside the window, whatever its width.

A page of frames holds the report once a width; a script in it measures, and Chromium
prints what it wrote. The report itself has no script.
"""

import html
import json
import re
import shutil
import struct
import subprocess

import pytest

from cocodc_jax.report import page, plots
from cocodc_jax.report.comparison import compare
from tests.report.made_up import run

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
WIDTHS = (1200, 800, 400)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--hide-scrollbars --virtual-time-budget=20000"
).split()

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason=f"no browser here: none of {', '.join(NAMES)} is installed"
)

MEASURE = """
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const inside = frame.contentDocument, root = inside.documentElement;
    const outside = [...inside.querySelectorAll("body *")].filter(element => {
      const box = element.getBoundingClientRect();
      return box.left < 0 || box.right > root.clientWidth + 0.5;
    }).map(element => element.outerHTML.slice(0, 120));
    const shown = name => [...inside.querySelectorAll(name)]
      .filter(element => element.checkVisibility()).length;
    const clipped = [...inside.querySelectorAll("th, td, td div")]
      .filter(cell => cell.scrollWidth > cell.clientWidth + 1)
      .map(cell => cell.textContent);
    return {width: root.clientWidth, content: root.scrollWidth, outside, clipped,
            cells: shown("td"), pres: shown("pre"), details: shown("details")};
  });
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
});
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two seeds of methods with long names; one diverged, two are faint."""
    methods = ("diloco", "data_parallel", "streaming_diloco+adamw", "decoupled_diloco")
    runs = [run(m, s, 1.5 + 0.1 * s) for m in methods for s in (0, 1)]
    runs += [run("co2", s, 1.9, steps=150) for s in (0, 1)]
    text = page.render(
        compare(runs, "diloco", {"mla": "seed 0: NaN at step 37 " + 9 * "and more "}),
        {
            "Loss.": plots.png_bytes(plots.loss_by_steps(runs)),
            "Syncs.": plots.png_bytes(plots.fragments_in_flight(runs)),
        },
        "python -m experiments.compare --workdir=" + 60 * "long/",
        {"run": {"steps": 480, "text": 300 * "x"}},
        "5 cpu devices on 2 cores.",
    )
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text)
    return path


def chromium(tmp_path, *flags):
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_every_column_is_inside_the_window(report, tmp_path):
    source = html.escape(report.read_text(), quote=True)
    frames = [
        f'<iframe srcdoc="{source}" style="width:{width}px;height:900px;border:0">'
        "</iframe>"
        for width in WIDTHS
    ]
    harness = tmp_path / "frames.html"
    harness.write_text(f"<body>{''.join(frames)}<script>{MEASURE}</script></body>")
    printed = chromium(tmp_path, "--dump-dom", f"file://{harness}")
    told = re.search("FOUND(.*)END", printed, re.DOTALL)
    assert told, printed[:2000]
    found = json.loads(html.unescape(told.group(1)))
    assert [frame["width"] for frame in found] == list(WIDTHS)
    for frame in found:
        assert frame["content"] <= frame["width"], frame
        assert not frame["outside"], frame
        assert not frame["clipped"], frame
        # Six and eight measures of five methods, and why two tables lack one.
        assert frame["cells"] == 5 * (6 + 8) + 2
        # The command is shown, the configuration folded away.
        assert (frame["details"], frame["pres"]) == (1, 1)


def test_a_screenshot_shows_the_page(report, tmp_path):
    picture = tmp_path / "page.png"
    flags = ("--window-size=1200,900", f"--screenshot={picture}")
    chromium(tmp_path, *flags, f"file://{report}")
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1200, 900)
    assert len(data) > 20_000  # A blank page has a twentieth of it.
