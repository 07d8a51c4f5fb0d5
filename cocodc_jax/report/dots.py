"""One loss a model, compared on one axis."""

from collections.abc import Collection, Mapping

from cocodc_jax._extras import extra
from cocodc_jax.report.plots import COLORS, WIDTH_IN

with extra("report"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


def losses(values: Mapping[str, float], faint: Collection[str] = ()) -> Figure:
    """Draw a row a model, a dot at its loss, the value written beside it.

    Dots and not bars: the axis begins near the least loss, and a bar's length would
    then tell nothing.
    """
    figure = Figure(figsize=(WIDTH_IN, 0.28 * len(values) + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, (name, loss) in enumerate(values.items()):
        color = "#999999" if name in faint else COLORS[2]
        axes.plot(loss, row, marker="o", markersize=6, color=color)
        axes.annotate(
            f"{loss:.3f}",
            xy=(loss, row),
            xytext=(7, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize="small",
            color=color,
        )
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    # Room for the number beside the last dot.
    low, high = min(values.values()), max(values.values())
    span = high - low or 0.1
    axes.set_xlim(low - 0.05 * span, high + 0.12 * span)
    axes.set_xlabel("evaluation loss (nats per token)")
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure
