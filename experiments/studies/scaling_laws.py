r"""Fits losses of a sweep over parameters, regions and the interval (2503.09799).

    python -m experiments.sweep --grid=experiments/grids/scaling.toml --workdir=DIR
    python -m experiments.studies.scaling_laws --workdir=DIR

reads DIR/cells.json, with the tuned column of a setting if there is one, and fits
L = A N^alpha M^beta H^gamma for every method with enough settings. Prints the exponents
with 95 % intervals, the error at the largest size of the law of the smaller ones, and
the law's loss at --predict parameters, marked as an extrapolation if it is one. Writes
scaling.json and scaling.png to DIR.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from cocodc_jax.files import write_whole
from cocodc_jax.report import plots
from cocodc_jax.run import flags
from cocodc_jax.run.config import dumps

from .. import program
from ..sweeps.results import column_of, read_cells
from .scaling import FACTORS, Law, Observation, fit, held_out

Observations = dict[str, list[Observation]]


def main() -> None:
    """Read the cells, fit, print, write."""
    console = Console()
    with flags.usage_errors():
        folder, at = _flags()
        found = _observed(folder)
        laws, refused = fits(found)
        if not laws:
            whys = [f"{name}: {why}" for name, why in refused.items()]
            raise ValueError(
                f"workdir={str(folder)!r} has no method to fit: "
                + ("; ".join(whys) or "every row diverged or is unfinished")
            )
    for name, law in laws.items():
        for line in told(name, law, found[name], at):
            console.print(line, highlight=False, soft_wrap=True)
    for name, why in refused.items():
        console.print(f"{name}: not fitted, {why}", highlight=False, soft_wrap=True)
    write_whole(folder / "scaling.json", dumps(to_json(laws, found, at)))
    plots.save_png(figure(laws, found), str(folder / "scaling.png"))
    console.print(f"Written: {folder / 'scaling.json'}, scaling.png", soft_wrap=True)


def observations(cells: Sequence[Mapping[str, Any]]) -> Observations:
    """Return the observations of each method."""
    found: Observations = {}
    for cell in cells:
        column = column_of(cell)
        if column is None or column["loss"] is None:
            continue
        config = column["config"]
        factors = {
            "N": float(column["parameters"]),
            "M": float(config["run"]["regions"]),
            # A method that exchanges at every step has the interval 1.
            "H": float(cell["flags"].get("sync_interval") or 1),
        }
        method = found.setdefault(cell["flags"]["method"], [])
        method.append(Observation(factors, column["loss"]["mean"]))
    return found


def fits(found: Observations) -> tuple[dict[str, Law], dict[str, str]]:
    """Return the law of each method, and the reasons why others have none."""
    laws, refused = {}, {}
    for name, seen in found.items():
        try:
            laws[name] = fit(seen)
        except ValueError as error:
            refused[name] = str(error)
    return laws, refused


def to_json(laws: Mapping[str, Law], found: Observations, at: float) -> dict[str, Any]:
    """Return plain values."""
    made = {}
    for name, law in laws.items():
        factors = _at(found[name], at)
        loss, low, high = law.predict(factors)
        made[name] = {
            "A": law.scale,
            "exponents": {
                factor: {"mean": e.mean, "half": e.half}
                for factor in FACTORS
                if (e := law.exponent(factor))
            },
            "residual": law.residual,
            "fitted_over": law.sizes,
            "largest_foretold_to": _foretold(found[name]),
            "extrapolated": {
                "loss": loss,
                "low": low,
                "high": high,
                "factors": factors,
            },
            "observations": [
                {**seen.factors, "loss": seen.loss} for seen in found[name]
            ],
        }
    return made


def figure(laws: Mapping[str, Law], found: Observations) -> Figure:
    """Plot losses over parameters with the fitted laws, one panel per method."""
    made = Figure(figsize=(plots.WIDTH_IN, 3.4), layout="constrained")
    panels = made.subplots(1, len(laws), sharey=True, squeeze=False)[0]
    for axes, (name, law) in zip(panels, laws.items(), strict=True):
        others = sorted({(s.factors["M"], s.factors["H"]) for s in found[name]})
        for index, (regions, interval) in enumerate(others):
            color = plots.COLORS[index % len(plots.COLORS)]
            seen = [
                s
                for s in found[name]
                if (s.factors["M"], s.factors["H"]) == (regions, interval)
            ]
            axes.scatter(
                [s.factors["N"] for s in seen],
                [s.loss for s in seen],
                color=color,
                s=14,
            )
            at = [{"N": n, "M": regions, "H": interval} for n in law.sizes]
            axes.plot(
                law.sizes,
                [law.predict(a)[0] for a in at],
                color=color,
                linewidth=1,
                label=f"M {regions:g}, H {interval:g}",
            )
        axes.set(xscale="log", yscale="log", xlabel="parameters", title=name)
        # Ticks at the sizes that were run: a narrow panel has no room for more.
        axes.set_xticks(sorted({s.factors["N"] for s in found[name]}))
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="x", rotation=30)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    panels[0].set_ylabel("evaluation loss (nats per token)")
    return made


def told(name: str, law: Law, seen: Sequence[Observation], at: float) -> list[str]:
    """Return a law in three lines."""
    powers = " ".join(
        f"{factor}^({e:+.4f})" for factor in FACTORS if (e := law.exponent(factor))
    )
    smallest, largest = law.sizes
    foretold = _foretold(seen)
    off = "too few sizes" if foretold is None else f"{foretold:.2%} off"
    factors = _at(seen, at)
    loss, low, high = law.predict(factors)
    return [
        f"{name}: L = {law.scale:.3f} {powers}, residual {law.residual:.2%}, "
        f"{len(seen)} settings of {smallest:,.0f} to {largest:,.0f} parameters",
        f"  the largest size, by the law of the smaller ones: {off}",
        f"  {_how_far(at, smallest, largest)}: {loss:.3f} "
        f"({low:.3f} to {high:.3f}) at N {at:g}, M {factors['M']:g}, H "
        f"{factors['H']:g}",
    ]


def _how_far(at: float, smallest: float, largest: float) -> str:
    if smallest <= at <= largest:
        return "within the sizes that were run"
    whose, size = ("largest", largest) if at > largest else ("smallest", smallest)
    times = f"{at / size:,.0f}" if at >= 10 * size else f"{at / size:.2g}"
    return f"an extrapolation, {times} times the {whose}"


def _foretold(seen: Sequence[Observation]) -> float | None:
    """Return the mean relative error at the largest size; None without a law."""
    try:
        pairs = held_out(seen)
    except ValueError:
        return None
    errors = [abs(math.log(predicted / observed)) for predicted, observed in pairs]
    return math.expm1(sum(errors) / len(errors))


def _at(seen: Sequence[Observation], parameters: float) -> dict[str, float]:
    """Return factors with the most regions and the longest interval that were run."""
    longest = {f: max(s.factors[f] for s in seen) for f in FACTORS}
    return longest | {"N": parameters}


def _flags() -> tuple[pathlib.Path, float]:
    if not flags.value("workdir"):
        raise ValueError("workdir=None is missing; name the folder of a sweep")
    at = flags.value("predict")
    if not 1 <= at < math.inf:
        raise ValueError(f"predict={at} must be a number of parameters, such as 1e9")
    return pathlib.Path(flags.value("workdir")), at


def _observed(folder: pathlib.Path) -> Observations:
    path = folder / "cells.json"
    if not path.exists():
        raise ValueError(
            f"workdir={str(folder)!r} has no cells.json; experiments.sweep --report "
            "writes it"
        )
    return read_cells(path, observations)


def define() -> None:
    """Define the program's flags."""
    flags.define_one(str, "workdir", None, "Folder of a sweep, with its cells.json.")
    flags.define_one(
        float,
        "predict",
        1e9,
        "Parameters to extrapolate to, with the most regions "
        "and the longest interval that were run.",
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
