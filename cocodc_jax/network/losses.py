"""Simulated seconds to a target loss, from a measured loss curve."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from cocodc_jax.network.timeline import Timeline


def read_curve(
    path: str | pathlib.Path, key: str = "eval_loss"
) -> list[tuple[float, float]]:
    """Reads (step, loss) pairs from JSON lines or from a JSON list of pairs.

    Args:
      path: a file of one JSON table a line, as metrics.jsonl, or of one JSON list.
      key: entry of a line that holds the loss; lines without it are skipped.

    Raises:
      ValueError: naming the file, if it holds no such pair.
      OSError: if the file cannot be read.
    """
    text = pathlib.Path(path).read_text()
    try:
        if text.lstrip().startswith("["):
            pairs = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            pairs = [(row["step"], row[key]) for row in rows if key in row]
        curve = [(float(step), float(loss)) for step, loss in pairs]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no loss curve: {error!r}") from error
    if not curve:
        raise ValueError(f"{path} has no line with both 'step' and {key!r}")
    return curve


def steps_to_loss(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Returns the first step, linearly interpolated, at which a curve is at `target`.

    Args:
      curve: (step, loss) pairs, steps increasing.
      target: loss to reach.

    Returns:
      A step count, or None if the curve never comes down to the target.

    Raises:
      ValueError: if the curve is empty or its steps do not increase.

    >>> steps_to_loss([(0, 4.0), (100, 3.0), (200, 2.0)], 2.5)
    150.0
    """
    steps, losses = np.asarray(curve, dtype=float).reshape(-1, 2).T
    if not len(steps) or np.any(np.diff(steps) <= 0):
        raise ValueError(f"loss curve steps must increase, got {steps.tolist()}")
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return None
    i = int(reached[0])
    if i == 0:
        return float(steps[0])
    share = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def seconds_to_loss(
    timeline: Timeline, curve: Sequence[tuple[float, float]], target: float
) -> float | None:
    """Returns the simulated seconds until the slowest region reaches a loss.

    Beyond the simulated steps the pace of the second half of the timeline goes on, so
    simulate at least two whole sync intervals.

    Args:
      timeline: result of `simulator.simulate`.
      curve: measured (step, loss) pairs of the same method.
      target: loss to reach.

    Returns:
      Seconds, or None if the curve never comes down to the target.
    """
    steps = steps_to_loss(curve, target)
    if steps is None:
        return None
    num = timeline.num_steps
    if steps <= num:
        below = int(steps)
        begin = timeline.times_s(below).max()
        end = timeline.times_s(min(below + 1, num)).max()
        return float(begin + (steps - below) * (end - begin))
    end, half = timeline.times_s(num).max(), timeline.times_s(num // 2).max()
    return float(end + (steps - num) * (end - half) / (num - num // 2))
