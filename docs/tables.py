"""Tables and plots of the results pages, from `experiments/results` at build time."""

import io
import json
import pathlib

from IPython.display import SVG, Markdown
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

import cocodc_jax
from cocodc_jax.report import palette
from cocodc_jax.report.units import format_bytes
from experiments.sweeps.cells import label

RESULTS = pathlib.Path(cocodc_jax.__file__).parents[1] / "experiments" / "results"
SHOWN = ("method", "compress", "sync_interval", "delay_steps")
MACHINE = "two cores of a shared x86 machine"
GPU = "one NVIDIA H200"
# Flags that tell the cells of a sweep apart, in the symbols of the glossary.
SYMBOLS = {
    "num_fragments": "K",
    "syncs_per_interval": "N",
    "mixing_alpha": "alpha",
    "compensation_strength": "lambda",
    "progress_weight": "rho",
    "outer_momentum": "outer momentum",
    "outer_lr": "outer lr",
    "inner_lr": "inner lr",
    "regions": "M",
    "batch_per_region": "batch",
}


def read(name):
    """Return a file of results."""
    return json.loads((RESULTS / name).read_text())


def table(heads, rows, note=""):
    """Return a Markdown table, with a note below it."""
    lines = [heads, ["---"] * len(heads), *rows]
    text = "\n".join("| " + " | ".join(map(str, x)) + " |" for x in lines)
    return Markdown(f"{text}\n\n{note}")


def interval(value, form=".3f"):
    """Return a mean and the half of its interval; a dash for none."""
    if value is None:
        return "-"
    half = value.get("half")
    text = format(value["mean"], form)
    if half is None:
        return text

    # Spaces that do not break keep it in one piece.
    return f"{text}\u00a0±\u00a0{format(half, form.strip('+'))}"


def cells(name, keep=lambda cell: True, hide=(), machine=MACHINE):
    """Return the cells of a sweep as a table, by the bytes that a region sent."""
    sweep = read(name)
    reference = sweep["reference"]
    kept = list(filter(keep, sweep["cells"]))
    names = [n for n in ("published", "tuned") if any(n in c["columns"] for c in kept)]

    heads = ["method", "precision", "H", "tau", "settings", "sent by a region"]
    heads += [f"loss, {n}" for n in names]
    heads += ["difference in loss", "steps to the same loss"]

    rows = []
    for cell in sorted(kept, key=lambda c: _last(c)["bytes"]):
        flags = cell["flags"]
        last = _last(cell)
        exact = flags.get("compress") in (None, "none")
        rows.append(
            [
                f"`{flags['method']}`",
                "float32" if exact else f"`{flags['compress']}`",
                flags.get("sync_interval") or "-",
                "-" if flags.get("delay_steps") is None else flags["delay_steps"],
                _settings(flags, hide),
                format_bytes(last["bytes"]).replace(" ", "\u00a0"),
                *(interval(cell["columns"].get(n, {}).get("loss")) for n in names),
                interval(last["difference"], "+.3f"),
                interval(last["steps_to_reference"], ".0f"),
            ]
        )

    if all(row[4] == "-" for row in rows):
        for row in [heads, *rows]:
            del row[4]

    note = f"Differences in loss are from `{reference['cell']}`, {reference['column']}."
    if sum(row[-1] == "-" for row in rows) >= len(rows) - 1:
        for row in [heads, *rows]:
            del row[-1]
    else:
        note += " Steps are those to its last loss."
    return table(heads, rows, f"{note} {_seeds(kept)}; {machine}.")


def _seeds(cells):
    """Return the number of seeds of the cells, in words."""
    counts = {len(c["seeds"]) for cell in cells for c in cell["columns"].values()}
    least = min(counts)
    most = max(counts)
    count = f"{most}" if least == most else f"{least} to {most}"
    return "One seed" if most == 1 else f"{count} seeds, means with 95 % intervals"


def _last(cell):
    columns = cell["columns"]
    return columns.get("tuned") or columns["published"]


def _settings(flags, hide):
    settings = []
    for name, value in flags.items():
        if name in SHOWN or name in hide or value in (None, False):
            continue
        symbol = SYMBOLS.get(name, name)
        settings.append(f"`--{name}`" if value is True else f"{symbol} {value}")
    return ", ".join(settings) or "-"


# Contenders by some of their flags: the first cell with these is the contender's.
CONTENDERS = {
    "one bit": {"method": "streaming_diloco", "compress": "ef+sign"},
    "two bits": {"method": "streaming_diloco", "compress": "ef+stat2"},
    "streaming": {"method": "streaming_diloco", "compress": None, "sync_interval": 40},
    "diloco": {"method": "diloco"},
    "cocodc": {"method": "cocodc", "sync_interval": 40},
    "rule=code": {"method": "cocodc_paper", "rule": "code"},
    "rule=text": {"method": "cocodc_paper", "rule": "text"},
    "data parallel": {"method": "data_parallel"},
}
# Merge rules for a delayed mean.
LATE = {
    "mix": {"method": "streaming_diloco", "merge_feedback": None},
    "feedback": {"method": "streaming_diloco", "merge_feedback": True},
    "isotropic": {"method": "cocodc", "curvature": "isotropic"},
    "normalised": {"method": "cocodc", "curvature": "normalized_outer_product"},
}


def across(files, what, shown=tuple(CONTENDERS), less=("one bit", "cocodc")):
    """Return a table of sweeps: tuned losses, differences from the reference, steps.

    Args:
      files: the file of results of each row, by the text of its first column.
      what: the head of the first column.
      shown: contenders whose losses are shown.
      less: contenders whose differences from the reference are shown.
    """
    rows = []
    for size, name in files.items():
        cells = read(name)["cells"]
        last = {n: _last(cell) for n in shown if (cell := named(cells, n))}
        differences = [_less_and_fewer(last.get(n)) for n in less]
        losses = [_loss(last.get(n)) for n in shown]
        rows.append([size, *sum(differences, ()), *losses])

    heads = []
    for name in less:
        heads += [f"{name}: difference in loss", "steps saved"]
    return table([what, *heads, *shown], rows)


def _loss(column):
    """Return a loss without its interval, most of which is the seeds' text."""
    return interval(column and {"mean": column["loss"]["mean"]})


def _less_and_fewer(column):
    """Return the difference from the reference, and the steps saved to its loss."""
    if column is None:
        return "-", "-"

    difference = interval(column["difference"], "+.3f")
    steps = column["steps_to_reference"]
    if not steps:
        return difference, "-"

    total = column["curve"][-1][0]
    saved_percent = {
        "mean": 100 - 100 * steps["mean"] / total,
        "half": steps["half"] and 100 * steps["half"] / total,
    }
    return difference, interval(saved_percent, ".0f") + "\u00a0%"


def beside(name, lines):
    """Return a table of a sweep's losses next to those of other sweeps.

    Args:
      name: the file of results of the mixture.
      lines: by the text of a row, which begins with a contender, its column and the
        file of results of a dense model.
    """
    rows = []
    for words, (column, dense) in lines.items():
        contender = words.split(",")[0]
        losses = []
        for file in (name, dense):
            cell = named(read(file)["cells"], contender)
            losses.append(interval(cell["columns"][column]["loss"]))
        rows.append([words, *losses])
    return table(["", "mixture", "dense"], rows)


def named(cells, name):
    """Return the first cell with the flags of a contender; None if there is none."""
    wanted = (CONTENDERS | LATE)[name]
    for cell in cells:
        flags = cell["flags"] | (_last(cell)["config"] or {}).get("method", {})
        plain = {k: None if v in ("none", False) else v for k, v in flags.items()}
        if all(plain.get(k) == v for k, v in wanted.items()):
            return cell
    return None


def frontier(*names, keep=lambda cell: True):
    """Return a plot of loss against the bytes that a region sent, with intervals.

    Points of one method have one color; the recommended setting has its own.
    """
    groups = {}
    for name in names:
        for cell in filter(keep, read(name)["cells"]):
            groups.setdefault(_group(cell), []).append(_last(cell))

    figure, axes = _figure(4.2)
    for group, color in palette.colors(groups).items():
        columns = sorted(groups[group], key=lambda column: column["bytes"])
        is_recipe = group == palette.RECIPE
        axes.errorbar(
            [column["bytes"] / 1e6 for column in columns],
            [column["loss"]["mean"] for column in columns],
            [column["loss"]["half"] or 0 for column in columns],
            fmt="D" if is_recipe else "o",
            markersize=9 if is_recipe else 6,
            color=color,
            capsize=2,
            zorder=3 if is_recipe else 2,
            label=LABELS.get(group, group),
        )

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("MB sent by a region (log scale)")
    axes.set_ylabel("last loss, nats per token")
    return _svg(figure, legend=True)


# Labels of the recommended setting and of merge rules in legends.
LABELS = {
    palette.RECIPE: "recommended: one bit",
    "feedback": "Streaming DiLoCo with the merge's feedback",
    "isotropic": "CoCoDC, isotropic compensation",
    "normalised": "CoCoDC, normalised correction",
}


def _group(cell):
    """Return the method of a cell, or `palette.RECIPE` for the recommended setting."""
    flags = cell["flags"] | (_last(cell)["config"] or {}).get("method", {})
    is_often = flags.get("sync_interval") == flags.get("num_fragments")
    is_one_bit = flags.get("compress") == "ef+sign"
    if flags["method"] == "streaming_diloco" and is_often and is_one_bit:
        return palette.RECIPE
    return flags["method"]


def losses(name, keep=lambda cell: True, called=None):
    """Return a plot of the last losses of a sweep with intervals, the best on top."""
    kept = [(cell, _last(cell)) for cell in filter(keep, read(name)["cells"])]
    kept.sort(key=lambda pair: -pair[1]["loss"]["mean"])

    shades = palette.colors(dict.fromkeys(_group(cell) for cell, _ in kept))
    figure, axes = _figure(0.9 + 0.42 * len(kept), width_in=7.5)
    for row, (cell, column) in enumerate(kept):
        loss = column["loss"]
        color = shades[_group(cell)]
        axes.errorbar(
            loss["mean"], row, xerr=loss["half"] or 0, fmt="o", color=color, capsize=2
        )

    axes.set_yticks(range(len(kept)), [(called or label)(c["flags"]) for c, _ in kept])
    axes.set_xlabel("last loss, nats per token")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    return _svg(figure)


def saved(panels):
    """Return plots of the steps that one bit saves against Streaming DiLoCo, tuned.

    `panels` has, by the label of an x axis, series by name; each has a file of results
    for each x.
    """
    figure, all_axes = _figure(3.9, num=len(panels), sharey=True)
    for axes, (xlabel, series) in zip(all_axes, panels.items(), strict=True):
        for (name, files), style in zip(series.items(), ("o-", "s--"), strict=False):
            means, halves = zip(*map(_saved, files.values()), strict=True)
            color = palette.COLORS[palette.RECIPE]
            axes.errorbar(
                list(files),
                means,
                halves,
                fmt=style,
                color=color,
                capsize=3,
                label=name,
            )

        axes.axhline(0, color="#999999", linewidth=0.8)
        values = [x for files in series.values() for x in files]
        is_wide = max(values) > 16 * min(values)
        axes.set_xscale("log", base=4 if is_wide else 2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_xlabel(xlabel)
        if len(series) > 1:
            axes.legend(frameon=False)

    all_axes[0].set_ylabel("steps saved, %")
    return _svg(figure)


def _saved(name):
    """Return the percentage of steps saved, and half of its interval."""
    column = _last(named(read(name)["cells"], "one bit"))
    steps = column["steps_to_reference"]
    total = column["curve"][-1][0]
    return 100 - 100 * steps["mean"] / total, 100 * (steps["half"] or 0) / total


def late(files):
    """Return a plot of how far rules are ahead of the mix, by steps of delay."""
    figure, axes = _figure(3.6)
    shades = {
        "feedback": palette.COLORS["streaming_diloco"],
        "isotropic": palette.COLORS["cocodc"],
        "normalised": "#CC79A7",
    }

    for rule, color in shades.items():
        differences = [
            _last(named(read(name)["cells"], rule))["difference"]
            for name in files.values()
        ]
        axes.errorbar(
            list(files),
            [-x["mean"] for x in differences],
            [x["half"] or 0 for x in differences],
            fmt="o-",
            color=color,
            capsize=3,
            label=LABELS[rule],
        )

    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("delay and interval, in steps")
    axes.set_ylabel("less loss than the mix")
    return _svg(figure, legend=True)


def bars(rows, xlabel, line=None):
    """Return horizontal bars by name, the longest on top, with a line at a value."""
    values = dict(sorted(rows.items(), key=lambda pair: pair[1]))
    figure, axes = _figure(0.9 + 0.4 * len(values), width_in=7.5)

    shades = [palette.COLORS.get(name, "#7A9CC6") for name in values]
    drawn = axes.barh(list(values), list(values.values()), color=shades)
    axes.bar_label(drawn, [f"{x:.2f}" for x in values.values()], padding=4)

    if line is not None:
        axes.axvline(line, color="#555555", linewidth=1)
    axes.set_xlabel(xlabel)
    axes.margins(x=0.12)
    return _svg(figure)


def returns(chaos):
    """Return a histogram of the seconds from a kill to the region's return."""
    figure, axes = _figure(2.8)
    seconds = chaos["seconds_from_kill_to_return"]
    axes.hist(seconds, bins=range(0, int(max(seconds)) + 6, 5), color="#7A9CC6")
    axes.set_xlabel("seconds from a kill to the region's return")
    axes.set_ylabel("kills")
    return _svg(figure)


def _figure(height_in, num=1, width_in=6.2, **looks):
    """Return a figure with large letters, readable on a phone, and its axes."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    all_axes = figure.subplots(1, num, squeeze=False, **looks)[0]
    for axes in all_axes:
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, all_axes if num > 1 else all_axes[0]


def _svg(figure, legend=False):
    """Return a figure as SVG with larger letters, the same bytes every time."""
    if legend:
        labels = figure.axes[0].get_legend_handles_labels()[1]
        ncols = 2 if max(map(len, labels)) <= 22 else 1
        figure.legend(loc="outside upper center", ncols=ncols, frameon=False)

    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": "tables"}):
        for text in figure.findobj(Text):
            text.set_fontsize(1.2 * text.get_fontsize())
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return SVG(drawn.getvalue())
