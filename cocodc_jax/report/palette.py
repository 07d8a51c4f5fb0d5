"""A color for each method, the same in all plots.

The colors are Okabe and Ito's, which remain distinct under the common forms of color
blindness, without their yellow (too faint on white). That leaves seven: the main
methods of this package have fixed ones, the first two others get the remaining ones,
and all further methods are grey. A legend with more colors cannot be read; labels
beside the curves distinguish the grey ones.
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
    """Return a color for each name; names beyond the palette share grey.

    >>> colors(["diloco", "noloco", "demo", "snoo"])
    {'diloco': '#009E73', 'noloco': '#CC79A7', 'demo': '#56B4E9', 'snoo': '#9A9A9A'}
    """
    names = list(names)
    others = iter(_OTHERS)

    return {
        name: COLORS[name] if name in COLORS else next(others, GREY) for name in names
    }
