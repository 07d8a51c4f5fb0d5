r"""Fits losses of a sweep over parameters, regions and the interval (2503.09799).

    python -m experiments.sweep --grid=experiments/grids/scaling.toml --workdir=DIR
    python -m experiments.studies.scaling_laws --workdir=DIR

reads DIR/cells.json, with the tuned column of a setting if there is one, and fits
L = A N^alpha M^beta H^gamma for every method with enough settings. Prints the exponents
with 95 % intervals, the error at the largest size of the law of the smaller ones, and
the law's loss at --predict parameters, marked as an extrapolation if it is one. Writes
scaling.json and scaling.png to DIR.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from cocodc_jax.files import write_whole
from cocodc_jax.report import plots
from cocodc_jax.run import flags
from cocodc_jax.run.config import dumps

from .. import program
from ..sweeps.cells import CONFIDENCE, Interval
from ..sweeps.report import column_of, read_cells
from ..sweeps.schedule import differing

FACTORS = ("N", "M", "H")  # Parameters, regions, the interval.
# Flags by which the factors are varied, and what goes with them.
SIZES = (
    "num_layers", "width", "mlp_width", "num_heads", "steps", "warmup_steps", "regions",
    "batch_per_region", "eval_batches", "sync_interval",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Observation:
    """The loss of one setting, nats per token, with its values of `FACTORS`."""

    factors: Mapping[str, float]
    loss: float
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Observations = dict[str, list[Observation]]


@dataclasses.dataclass(frozen=True)
class Law:
    """L = A N^alpha M^beta H^gamma, with the factors that vary.

    The form is that of arXiv 2503.09799 (section on scaling laws: L = A N^alpha M^beta,
    fitted in logarithms), with one more factor H^gamma. The fit is ordinary least
    squares of log L. Intervals are Student's at 95 % for that linear model. They
    include the scatter of the points about the law, but not an error in its form, which
    `held_out` tests.
    """

    names: tuple[str, ...]
    coefficients: np.ndarray  # log A, then the exponents in the order of `names`.
    covariance: np.ndarray
    residual: float  # Standard deviation of log L about the law.
    quantile: float  # Student's, for the remaining degrees of freedom.
    sizes: tuple[float, float]  # Least and most parameters of the fit.

    def exponent(self, name: str) -> Interval | None:
        """Return the exponent of a factor; None if the law does not have it."""
        if name not in self.names:
            return None
        index = 1 + self.names.index(name)
        half = self.quantile * math.sqrt(self.covariance[index, index])
        return Interval(float(self.coefficients[index]), half)

    @property
    def scale(self) -> float:
        """A, the loss where all factors are 1."""
        return math.exp(self.coefficients[0])

    def predict(self, factors: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the loss of a new setting with these factors, and its interval."""
        row = _row(factors, self.names)
        middle = float(row @ self.coefficients)
        variance = self.residual**2 + float(row @ self.covariance @ row)
        half = self.quantile * math.sqrt(variance)
        return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def fit(observations: Sequence[Observation]) -> Law:
    """Fit the law."""
    if apart := differing([o.flags for o in observations], SIZES):
        raise ValueError(
            f"settings differ in {', '.join(apart)} besides; keep one kind of them, by "
            "--report --only of experiments.sweep"
        )
    values = {name: {o.factors[name] for o in observations} for name in FACTORS}
    names = tuple(name for name in FACTORS if len(values[name]) > 1)
    if "N" not in names:
        raise ValueError(
            "a scaling law needs models of several sizes; all have the same"
        )
    least = len(names) + 3
    if len(observations) < least:
        raise ValueError(
            f"{len(observations)} settings are too few for a law over "
            f"{', '.join(names)}: it takes {least}"
        )
    design = np.stack([_row(o.factors, names) for o in observations])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        raise ValueError(
            f"{', '.join(names)} vary together in these settings, so their exponents "
            "are not determined"
        )
    logs = np.log([o.loss for o in observations])
    coefficients, *_ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(logs) - design.shape[1]
    residual = float(np.sqrt(np.sum((logs - design @ coefficients) ** 2) / freedom))
    from scipy import stats  # Takes a second to import.

    sizes = values["N"]
    return Law(
        names,
        coefficients,
        residual**2 * np.linalg.inv(design.T @ design),
        residual,
        float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)),
        (min(sizes), max(sizes)),
    )


def held_out(observations: Sequence[Observation]) -> list[tuple[float, float]]:
    """Return (predicted, observed) at the largest size, by the law of smaller ones."""
    largest = max(o.factors["N"] for o in observations)
    law = fit([o for o in observations if o.factors["N"] < largest])
    return [
        (law.predict(o.factors)[0], o.loss)
        for o in observations
        if o.factors["N"] == largest
    ]


def _row(factors: Mapping[str, float], names: Sequence[str]) -> np.ndarray:
    return np.array([1.0, *(math.log(factors[name]) for name in names)])


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
        method.append(Observation(factors, column["loss"]["mean"], cell["flags"]))
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
                factor: dataclasses.asdict(e)
                for factor in FACTORS
                if (e := law.exponent(factor))
            },
            "residual": law.residual,
            "fitted_over": law.sizes,
            "largest_foretold_to": _foretold(found[name]),
            "extrapolated": dict(loss=loss, low=low, high=high, factors=factors),
            "observations": [{**x.factors, "loss": x.loss} for x in found[name]],
        }
    return made


def figure(laws: Mapping[str, Law], found: Observations) -> Figure:
    """Plot losses over parameters with the fitted laws, one panel per method."""
    made = Figure(figsize=(plots.WIDTH_IN, 3.4), layout="constrained")
    panels = made.subplots(1, len(laws), sharey=True, squeeze=False)[0]
    for axes, (name, law) in zip(panels, laws.items(), strict=True):
        seen: dict[tuple[float, float], list[Observation]] = {}
        for each in found[name]:
            seen.setdefault((each.factors["M"], each.factors["H"]), []).append(each)
        for index, (others, points) in enumerate(sorted(seen.items())):
            color = plots.COLORS[index % len(plots.COLORS)]
            sizes = [s.factors["N"] for s in points]
            axes.scatter(sizes, [s.loss for s in points], color=color, s=14)
            factors = dict(zip(("M", "H"), others, strict=True))
            line = [law.predict({"N": size} | factors)[0] for size in law.sizes]
            label = f"M {others[0]:g}, H {others[1]:g}"
            axes.plot(law.sizes, line, color=color, linewidth=1, label=label)
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
    exponents = {factor: e for factor in FACTORS if (e := law.exponent(factor))}
    powers = " ".join(f"{factor}^({e:+.4f})" for factor, e in exponents.items())
    smallest, largest = law.sizes
    foretold, factors = _foretold(seen), _at(seen, at)
    off = "too few sizes" if foretold is None else f"{foretold:.2%} off"
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


def main() -> None:
    """Read the cells, fit, print, write."""
    console = Console()
    with flags.usage_errors():
        if not flags.value("workdir"):
            raise ValueError("workdir=None is missing; name the folder of a sweep")
        folder, at = pathlib.Path(flags.value("workdir")), flags.value("predict")
        if not 1 <= at < math.inf:
            raise ValueError(
                f"predict={at} must be a number of parameters, such as 1e9"
            )
        if not (folder / "cells.json").exists():
            raise ValueError(
                f"workdir={str(folder)!r} has no cells.json; experiments.sweep "
                "--report writes it"
            )
        found = read_cells(folder / "cells.json", observations)
        laws, refused = fits(found)
        if not laws:
            whys = [f"{name}: {why}" for name, why in refused.items()]
            raise ValueError(
                f"workdir={str(folder)!r} has no method to fit: "
                + ("; ".join(whys) or "every row diverged or is unfinished")
            )
    lines = [
        line for name, law in laws.items() for line in told(name, law, found[name], at)
    ]
    lines += [f"{name}: not fitted, {why}" for name, why in refused.items()]
    write_whole(folder / "scaling.json", dumps(to_json(laws, found, at)))
    plots.save_png(figure(laws, found), str(folder / "scaling.png"))
    lines.append(f"Written: {folder / 'scaling.json'}, scaling.png")
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def define() -> None:
    """Define the program's flags."""
    program.define(
        ("workdir", pathlib.Path, "Folder of a sweep, with its cells.json."),
        (
            *("predict", 1e9),
            "Parameters to extrapolate to, with the most regions and the longest "
            "interval that were run.",
        ),
    )


cli = program.with_run_flags(main, __doc__, define)

if __name__ == "__main__":
    cli()
