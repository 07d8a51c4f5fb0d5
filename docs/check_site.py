"""Checks a built site: links, images, e-mail links, and elements too wide for a phone.

No internal link is dead, every image exists, and no link is an e-mail address. Tables
and code are in boxes that scroll, so that no page scrolls sideways.

python docs/check_site.py FOLDER
"""

import collections
import html.parser
import pathlib
import sys
import urllib.parse
from collections.abc import Iterator

# Pages of the theme and of sources, which are not written here. Pages of modules link
# functions that are attributes of a class under the name of the class.
IGNORED = ("_modules", "_sources", "_static")

# Classes of boxes that scroll (tables.css and the theme), and of the index: its tables
# have one column on a phone.
SCROLLING = {"pst-scrollable-table-container", "cell_output", "highlight"}
NARROW = {"indextable"}


class Page(html.parser.HTMLParser):
    """Ids, links and images of a page, and its wide elements that do not scroll."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.images: list[str] = []
        self.wide: list[str] = []
        self._boxes: list[set[str]] = []  # Classes of the open div elements.
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Collect the ids, links and images of a tag."""
        values = dict(attrs)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("img", "source", "script") and values.get("src"):
            self.images.append(values["src"])

        classes = set((values.get("class") or "").split())
        if tag == "div":
            self._boxes.append(classes)
        if tag in ("table", "pre") and not classes & NARROW:
            if not any(box & SCROLLING for box in self._boxes):
                self.wide.append(tag)

    def handle_endtag(self, tag):
        """Leave a box."""
        if tag == "div" and self._boxes:
            self._boxes.pop()


def problems(site: pathlib.Path) -> Iterator[str]:
    """Yield the faults of a site, each as `page: fault`."""
    paths = [p for p in sorted(site.rglob("*.html")) if not _is_ignored(p, site)]
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in paths}
    if not pages:
        yield f"{site}: no page"

    for path, page in pages.items():
        name = path.relative_to(site)

        for link in page.links:
            if link.startswith("mailto:"):
                yield f"{name}: {link} is an e-mail link"
                continue

            target, anchor = _target(path, link)
            if target is None:
                continue
            if not target.exists():
                yield f"{name}: {link} is dead"
            elif anchor and target in pages and anchor not in pages[target].ids:
                yield f"{name}: {link} has no such place"

        for tag in page.wide:
            yield f"{name}: a <{tag}> is in no box that scrolls"

        for image in page.images:
            target, _ = _target(path, image)
            if target is not None and not target.exists():
                yield f"{name}: {image} is missing"


def _is_ignored(path: pathlib.Path, site: pathlib.Path) -> bool:
    return path.relative_to(site).parts[0] in IGNORED


def _target(page: pathlib.Path, link: str) -> tuple[pathlib.Path | None, str]:
    """Return the file and the place that a link names; no file for other sites."""
    parts = urllib.parse.urlsplit(link)
    if parts.scheme or parts.netloc:
        return None, ""
    anchor = urllib.parse.unquote(parts.fragment)
    if not parts.path:
        return page, anchor
    target = (page.parent / urllib.parse.unquote(parts.path)).resolve()
    return (target / "index.html" if target.is_dir() else target), anchor


def main() -> int:
    """Print the faults of a site; return 1 if there are any."""
    site = pathlib.Path(sys.argv[1]).resolve()
    counts = collections.Counter(problems(site))
    for problem, count in counts.items():
        times = f" ({count} times)" if count > 1 else ""
        print(f"{problem}{times}", file=sys.stderr)
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
