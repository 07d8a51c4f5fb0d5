"""A color for each method, the same in all plots.

The colors are Okabe and Ito's, which the common forms of color blindness keep apart,
less their yellow (too faint on white). There are seven: methods that this package is
about have theirs, two others get what is left, and the rest is grey. A legend of more
colors cannot be read; labels beside the curves tell grey ones apart.
"""

from collections.abc import Iterable, Mapping

RECIPE = "recipe"  # The recommended run of `experiments.compare`.
GREY = "#9A9A9A"

COLORS: Mapping[str, str] = {
    RECIPE: "#D55E00",
    "streaming_diloco": "#0072B2",
    "diloco": "#009E73",
    "cocodc": "#E69F00",
    "data_parallel": "#333333",
}
_OTHERS = ("#CC79A7", "#56B4E9")


def colors(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each name; names without one of their own share grey.

    >>> colors(["diloco", "noloco", "demo", "snoo"])
    {'diloco': '#009E73', 'noloco': '#CC79A7', 'demo': '#56B4E9', 'snoo': '#9A9A9A'}
    """
    names = list(names)
    others = iter(_OTHERS)

    return {
        name: COLORS[name] if name in COLORS else next(others, GREY) for name in names
    }
