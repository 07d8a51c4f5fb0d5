"""What is measured of a claim: small functions of files of results, by name.

Each takes `Results`, which finds the files, and the arguments that a claim's part has.
Intervals are Student's at 95 % over the seeds that both methods have, pairwise.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cocodc_jax.files import read_table
from cocodc_jax.network.links import Link, uniform
from cocodc_jax.network.simulator import simulate
from cocodc_jax.network.workload import Workload
from cocodc_jax.report.comparison import steps_to_loss
from cocodc_jax.run.config.train_config import flat
from cocodc_jax.sync import schedules

from ..sweeps import reference, report
from ..sweeps.cells import Interval

T = TypeVar("T")
Column = Mapping[str, Any]  # As cells.json has it.
Curve = list[tuple[float, float]]  # Steps and losses.
FOLDER = pathlib.Path(__file__).parents[1] / "results"


@dataclasses.dataclass(frozen=True)
class Results:
    """Files of results, by the names that claims give them.

    Attributes:
      folder: of all files.
      instead: paths of the files that lie elsewhere, such as those of a new run.
    """

    folder: pathlib.Path = FOLDER
    instead: Mapping[str, pathlib.Path] = dataclasses.field(default_factory=dict)

    def path(self, name: str) -> pathlib.Path:
        """Return the path of a file; it must be there."""
        path = self.instead.get(name, self.folder / name)
        if not path.exists():
            raise ValueError(
                f"results={name!r} is missing: {path} does not exist; results are in "
                "a checkout of the repository, name their folder with --results"
            )
        return path

    def column(self, name: str, words: str, column: str | None) -> Column:
        """Return a column of the one cell that has some flags.

        Args:
          name: of a file that a sweep wrote.
          words: the flags, as method=diloco,sync_interval=40.
          column: "published" or "tuned"; None is the latter, where there is one.
        """
        path = self.path(name)
        columns = report.read_cells(path, lambda cells: _columns(cells, column))
        fitting = [
            kept
            for kept in columns
            if kept["config"] and reference.has_flags(kept["config"], words)
        ]
        if len(fitting) != 1:
            raise ValueError(
                f"{words!r} is {len(fitting)} cells of {name} in column "
                f"{column or 'tuned'}; give flags of one"
            )
        return fitting[0]

    def columns(
        self, name: str, cells: Sequence[str], column: str | None
    ) -> list[Column]:
        """Return a column of each of some cells, see `column`."""
        return [self.column(name, words, column) for words in cells]


def _columns(cells: Any, column: str | None) -> list[Column]:
    if column is None:
        columns = [report.column_of(cell) for cell in cells]
    else:
        columns = [cell["columns"].get(column) for cell in cells]
    return [kept for kept in columns if kept is not None]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A measure of a claim.

    Attributes:
      of: measures it, from `Results` and the arguments of a claim's part. A gain is
        positive, for the rule `at_least`; a loss or an error is so for `at_most`.
      unit: of its value, in words.
      form: format specification of its mean.
    """

    of: Callable[..., Interval]
    unit: str
    form: str


def _fewer_steps(
    files: Results,
    *,
    results: str,
    method: str,
    baseline: str,
    column: str | None = None,
    of_outer: bool = False,
) -> Interval:
    """Return the steps that a method saves to the baseline's last loss, in percent.

    Where the baseline ends lower, they are those that the method needs more, of the
    baseline's steps to the method's last loss. Older files have no curves of single
    seeds. There the interval is that of the losses' difference, along the mean curves.

    With `of_outer` the method's losses are those of its outer parameters.
    """
    ours = files.column(results, method, column)
    theirs = files.column(results, baseline, column)
    if of_outer:
        if "curves_outer" not in ours:
            raise ValueError(f"{results} has no losses of outer parameters")
        ours = {**ours, "curves": ours["curves_outer"]}
    if ours.get("curves") and theirs.get("curves"):
        pairs = _pairs(_curve_of, ours, theirs)
        return Interval.of([_saved(curve, other) for curve, other in pairs])

    half = Interval.of([a - b for a, b in _pairs(_loss_of, ours, theirs)]).half or 0.0
    least, mean, most = (
        _saved(
            [(step, loss + shift) for step, loss, _ in ours["curve"]],
            [(step, loss) for step, loss, _ in theirs["curve"]],
        )
        for shift in (half, 0.0, -half)
    )
    return Interval(mean, (most - least) / 2)


def _saved(curve: Curve, other: Curve) -> float:
    """Return the percentage of steps that a curve saves to the end of another one."""
    steps, target = other[-1]
    ours = steps_to_loss(curve, target)
    if ours is not None:
        return 100 * (1 - ours / steps)

    last_step, last = curve[-1]
    theirs = steps_to_loss(other, last)
    assert theirs, "one of the two ends lower"
    return 100 * (1 - last_step / theirs)


def _more_loss(
    files: Results,
    *,
    results: str,
    method: str,
    baseline: str,
    column: str | None = None,
    baseline_results: str | None = None,
) -> Interval:
    """Return the last loss of a method less that of the baseline, in nats."""
    ours = files.column(results, method, column)
    theirs = files.column(baseline_results or results, baseline, column)
    return Interval.of([a - b for a, b in _pairs(_loss_of, ours, theirs)])


def _less_loss(
    files: Results,
    *,
    results: str,
    method: str,
    baseline: str,
    column: str | None = None,
    baseline_results: str | None = None,
) -> Interval:
    """Return the last loss of the baseline less that of a method, in nats."""
    more = _more_loss(
        files,
        results=results,
        method=method,
        baseline=baseline,
        column=column,
        baseline_results=baseline_results,
    )
    return Interval(-more.mean, more.half)


def _lower_loss(
    files: Results,
    *,
    results: str,
    method: str,
    baseline: str,
    column: str | None = None,
) -> Interval:
    """Return by how much a method's last loss is below the baseline's, in percent."""
    ours = files.column(results, method, column)
    theirs = files.column(results, baseline, column)
    pairs = _pairs(_loss_of, ours, theirs)
    return Interval.of([100 * (1 - a / b) for a, b in pairs])


def _fewer_bytes(
    files: Results,
    *,
    results: str,
    method: str,
    baseline: str,
    column: str | None = None,
    baseline_results: str | None = None,
) -> Interval:
    """Return the bytes of the baseline over those of a method, in equal steps."""
    ours = files.column(results, method, column)
    theirs = files.column(baseline_results or results, baseline, column)
    return Interval(theirs["bytes_per_step"] / ours["bytes_per_step"], None)


def _fewer_bytes_to_loss(
    files: Results,
    *,
    results: str,
    method: str,
    baseline: str,
    column: str | None = None,
) -> Interval:
    """Return the ratio of bytes that both sent until the baseline's last loss.

    Those of the baseline are of all its steps.
    """
    steps = _fewer_steps(
        files, results=results, method=method, baseline=baseline, column=column
    )
    ratio = _fewer_bytes(
        files, results=results, method=method, baseline=baseline, column=column
    ).mean

    share = 1 - steps.mean / 100
    half = None if steps.half is None else ratio * (steps.half / 100) / share**2
    return Interval(ratio / share, half)


def _smaller_gap(
    files: Results,
    *,
    results: str,
    other_results: str,
    method: str,
    baseline: str,
    column: str | None = None,
) -> Interval:
    """Return by how much the gap to a baseline is smaller here than in other results.

    The gap is the last loss of the method over that of the baseline, less 1, in
    percent.
    """
    both = (method, baseline)
    here = files.columns(results, both, column)
    elsewhere = files.columns(other_results, both, column)

    def gap(columns: list[Column], seed: int) -> float:
        ours, theirs = (_loss_of(one, seed) for one in columns)
        return 100 * (ours / theirs - 1)

    seeds = _common_seeds(*here, *elsewhere)
    return Interval.of([gap(elsewhere, seed) - gap(here, seed) for seed in seeds])


def _smaller_rise(
    files: Results,
    *,
    results: str,
    larger_results: str,
    method: str,
    baseline: str,
    column: str | None = None,
) -> Interval:
    """Return how much less a method loses by larger batches than the baseline."""
    both = (method, baseline)
    small = files.columns(results, both, column)
    large = files.columns(larger_results, both, column)
    seeds = _common_seeds(*small, *large)
    rises = [
        [_loss_of(after, seed) - _loss_of(before, seed) for seed in seeds]
        for before, after in zip(small, large, strict=True)
    ]
    return Interval.of([b - a for a, b in zip(*rises, strict=True)])


def _goodput_off(files: Results, *, results: str) -> Interval:
    """Return how far the simulator is off the steps that were done, in points."""
    run = read_table(files.path(results))
    return Interval(100 * abs(run["goodput_simulated"] - run["goodput"]), None)


def _faults_in_records(files: Results, *, results: str) -> Interval:
    """Return the number of merges that differ, and of gaps that no fault explains."""
    run = read_table(files.path(results))
    return Interval(len(run["merges_that_differ"]) + len(run["gaps_unexplained"]), None)


def _step_time_off(files: Results, *, results: str) -> Interval:
    """Return the simulator's largest error of a step's time in the lab, in percent."""
    rows = read_table(files.path(results))["rows"]
    ratios = [row["simulated_over_measured"]["step_s"] for row in rows]
    return Interval(100 * max(abs(ratio - 1) for ratio in ratios), None)


def _slowest(files: Results, *, results: str, methods_here: list[str]) -> Interval:
    """Return the least speed of some methods in the lab, in percent of no network."""
    rows = read_table(files.path(results))["rows"]
    speeds = [
        100 / row["measured"]["slowdown"]
        for row in rows
        if row["method"] in methods_here
    ]
    if not speeds:
        raise ValueError(f"methods_here={methods_here!r} has no method of {results}")
    return Interval(min(speeds), None)


def _utilization(
    files: Results,
    *,
    parameters: float,
    sync_interval: int,
    step_s: float,
    gbps: float,
    num_fragments: int = 1,
    delay_steps: int = 0,
    bits: int = 32,
    num_layers: int = 1,
    num_regions: int = 2,
    setup_s: float = 0.0,
) -> Interval:
    """Return the share of time in which regions compute, simulated, in percent.

    One fragment without delay is DiLoCo, several with one are Streaming DiLoCo. The
    second interval is measured: the first one fills the network. `setup_s` are seconds
    in it that no network model knows, such as those in which connections open.
    """
    del files
    size = parameters * bits / 8 / num_fragments
    schedule = schedules.staggered(sync_interval, num_fragments, delay_steps)
    timeline = simulate(
        uniform(num_regions, Link(gbps, latency_s=0.0)),
        Workload((size,) * num_fragments, (step_s,) * num_regions, num_layers),
        schedule,
        2 * sync_interval,
        sharing="fifo",
    )

    compute_s = sync_interval * step_s
    total_s = compute_s / timeline.utilization(since_step=sync_interval) + setup_s
    return Interval(100 * compute_s / total_s, None)


def _faster(
    files: Results,
    *,
    parameters: float,
    sync_interval: int,
    step_s: float,
    gbps: float,
    bits: float,
) -> Interval:
    """Return the simulated speed of one round late over that of an all-reduce a step.

    Of two regions; the all-reduce is blocking, of float32 gradients, and the message of
    a round has `bits` for each parameter.
    """
    del files
    links = uniform(2, Link(gbps, latency_s=0.0))
    steps_s = (step_s,) * 2

    gradients = Workload((4 * parameters,), steps_s)
    blocking = simulate(links, gradients, schedules.staggered(1), 4)
    message = Workload((parameters * bits / 8,), steps_s)
    late = schedules.staggered(sync_interval, 1, sync_interval - 1)
    rounds = simulate(links, message, late, 4 * sync_interval, collective="gather")
    return Interval((blocking.sim_s / 4) / (rounds.sim_s / (4 * sync_interval)), None)


def _pairs(
    of: Callable[[Column, int], T], ours: Column, theirs: Column
) -> list[tuple[T, T]]:
    seeds = _common_seeds(ours, theirs)
    return [(of(ours, seed), of(theirs, seed)) for seed in seeds]


def _common_seeds(*columns: Column) -> list[int]:
    """Return the seeds that all have; none may have diverged.

    Two at least: no verdict follows from one seed, which has no interval.
    """
    for column in columns:
        if column["diverged"]:
            method = flat(column["config"])["method"]
            raise ValueError(f"method={method} diverged with {column['diverged']}")

    seeds = set.intersection(*(set(column["seeds"]) for column in columns))
    if len(seeds) < 2:
        raise ValueError(
            f"the cells have seeds {sorted(seeds)} in common; a claim needs two or more"
        )
    return sorted(seeds)


def _loss_of(column: Column, seed: int) -> float:
    return column["losses"][column["seeds"].index(seed)]


def _curve_of(column: Column, seed: int) -> Curve:
    losses = column["curves"][column["seeds"].index(seed)]
    return [(step[0], loss) for step, loss in zip(column["curve"], losses, strict=True)]


MEASURES = {
    "fewer_steps": Measure(_fewer_steps, "% of steps saved", "+.1f"),
    "more_loss": Measure(_more_loss, "nats", "+.3f"),
    "less_loss": Measure(_less_loss, "nats", "+.3f"),
    "lower_loss": Measure(_lower_loss, "% less loss", "+.1f"),
    "fewer_bytes": Measure(_fewer_bytes, "times fewer bytes", ".3g"),
    "fewer_bytes_to_loss": Measure(
        _fewer_bytes_to_loss, "times fewer bytes to that loss", ".2f"
    ),
    "smaller_gap": Measure(_smaller_gap, "points", "+.2f"),
    "smaller_rise": Measure(_smaller_rise, "nats", "+.3f"),
    "goodput_off": Measure(_goodput_off, "points off", ".1f"),
    "faults_in_records": Measure(_faults_in_records, "faults", ".0f"),
    "step_time_off": Measure(_step_time_off, "% off at most", ".1f"),
    "slowest": Measure(_slowest, "% of the speed at least", ".0f"),
    "utilization": Measure(_utilization, "% of the time", ".1f"),
    "faster": Measure(_faster, "times as fast", ".0f"),
}
