"""Tables and plots of the results pages, from `experiments/results` at build time."""

import io
import json
import pathlib

from IPython.display import SVG, Markdown
from matplotlib.figure import Figure

import cocodc_jax
from cocodc_jax.report.units import format_bytes

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
    # In one piece, by spaces that do not break.
    return (
        text if half is None else f"{text}\u00a0±\u00a0{format(half, form.strip('+'))}"
    )


def cells(name, keep=lambda cell: True, hide=(), machine=MACHINE):
    """Return the cells of a sweep as a table, by the bytes that a region sent."""
    found = read(name)
    reference, kept = found["reference"], list(filter(keep, found["cells"]))
    names = [n for n in ("published", "tuned") if any(n in c["columns"] for c in kept)]
    heads = ["method", "precision", "H", "tau", "settings", "sent by a region"]
    heads += [f"loss, {n}" for n in names]
    heads += ["less the reference", "steps to its last loss"]
    rows = []
    for cell in sorted(kept, key=lambda c: _last(c)["bytes"]):
        flags, last = cell["flags"], _last(cell)
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
    if sum(row[-1] == "-" for row in rows) >= len(rows) - 1:
        for row in [heads, *rows]:
            del row[-1]
    note = f"The reference is `{reference['cell']}`, {reference['column']}."
    return table(heads, rows, f"{note} {_seeds(kept)}; {machine}.")


def _seeds(cells):
    """Say how many seeds the cells have."""
    found = {len(c["seeds"]) for cell in cells for c in cell["columns"].values()}
    least, most = min(found), max(found)
    count = f"{most}" if least == most else f"{least} to {most}"
    return "One seed" if most == 1 else f"{count} seeds, means with 95 % intervals"


def _last(cell):
    columns = cell["columns"]
    return columns.get("tuned") or columns["published"]


def _settings(flags, hide):
    said = []
    for name, value in flags.items():
        if name in SHOWN or name in hide or value in (None, False):
            continue
        symbol = SYMBOLS.get(name, name)
        said.append(f"`--{name}`" if value is True else f"{symbol} {value}")
    return ", ".join(said) or "-"


# Contenders by their flags; where a flag is not named, that of the first cell.
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
# Rules of a merge whose mean comes late.
LATE = {
    "mix": {"method": "streaming_diloco", "merge_feedback": None},
    "feedback": {"method": "streaming_diloco", "merge_feedback": True},
    "isotropic": {"method": "cocodc", "curvature": "isotropic"},
    "normalised": {"method": "cocodc", "curvature": "normalized_outer_product"},
}


def across(files, what, shown=tuple(CONTENDERS), less=("one bit", "cocodc")):
    """Return a table of sweeps: tuned losses, differences from the reference, steps."""
    rows = []
    for size, name in files.items():
        found = read(name)["cells"]
        last = {n: _last(cell) for n in shown if (cell := _named(found, n))}
        both = [_less_and_fewer(last.get(n)) for n in less]
        rows.append([size, *sum(both, ()), *(_loss(last.get(n)) for n in shown)])
    heads = [words for n in less for words in (f"{n}, less", "fewer steps")]
    return table([what, *heads, *shown], rows)


def _loss(column):
    """Return a loss without its interval, most of which is the seeds' text."""
    return interval(column and {"mean": column["loss"]["mean"]})


def _less_and_fewer(column):
    """Return the difference from the reference, and the steps saved to its loss."""
    if column is None:
        return "-", "-"
    steps, total = column["steps_to_reference"], column["curve"][-1][0]
    fewer = steps and {
        "mean": 100 - 100 * steps["mean"] / total,
        "half": steps["half"] and 100 * steps["half"] / total,
    }
    words = interval(fewer, ".0f") + "\u00a0%" * bool(fewer)
    return interval(column["difference"], "+.3f"), words


def beside(name, lines):
    """Return a table of a sweep's losses beside those of other sweeps."""
    mixture, rows = read(name)["cells"], []
    for words, (column, other) in lines.items():
        contender, *_ = words.split(",")
        both = [_named(found, contender) for found in (mixture, read(other)["cells"])]
        losses = [cell["columns"][column]["loss"] for cell in both]
        rows.append([words, *map(interval, losses)])
    return table(["", "mixture", "dense"], rows)


def _named(found, name):
    """Return the first cell with the flags of a contender; None if there is none."""
    wanted = (CONTENDERS | LATE)[name]
    for cell in found:
        flags = cell["flags"] | (_last(cell)["config"] or {}).get("method", {})
        plain = {k: None if v in ("none", False) else v for k, v in flags.items()}
        if all(plain.get(k) == v for k, v in wanted.items()):
            return cell
    return None


def frontier(name, keep=lambda cell: True):
    """Return a plot of loss against the bytes that a region sent, with intervals."""
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    by_method = {}
    for cell in filter(keep, read(name)["cells"]):
        by_method.setdefault(cell["flags"]["method"], []).append(_last(cell))
    for method, found in by_method.items():
        axes.errorbar(
            [c["bytes"] / 1e6 for c in found],
            [c["loss"]["mean"] for c in found],
            [c["loss"]["half"] or 0 for c in found],
            fmt="o",
            capsize=2,
            label=method,
        )
    axes.set_xscale("log")
    axes.set_xlabel("MB sent by a region")
    axes.set_ylabel("last loss, nats per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return SVG(drawn.getvalue())
