"""Run a program over an iterator of batches."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from cocodc_jax.core.state import PyTree, TrainState
from cocodc_jax.program.region_program import Output, RegionProgram

# Maximum steps of a scan, whose batches are all on the device at once.
MAX_SCAN_STEPS = 100


def run_steps(
    program: RegionProgram, state: TrainState, batches: Iterable[PyTree], num_steps: int
) -> Iterator[tuple[TrainState, Output]]:
    """Run `num_steps` inner steps and yield after every scan.

    There is a yield at every event, and possibly in between.

    Args:
      program: the compiled method.
      state: donated.
      batches: iterable of one step's host batches, leaves `[R, B, ...]`.
      num_steps: inner steps to do.

    Yields:
      The state and the `Output` of the steps since the last yield.

    Raises:
      ValueError: if `batches` ends too early, is a single batch, or has batches of
        different shapes in one scan; if `num_steps` is not a whole number.
    """
    if not hasattr(num_steps, "__index__"):
        raise ValueError(f"num_steps={num_steps!r} must be a whole number")

    stream = _stream(batches)
    end = state.step + num_steps
    while state.step < end:
        ahead = program.steps_to_event(state) or MAX_SCAN_STEPS
        length = min(ahead, end - state.step, MAX_SCAN_STEPS)
        chunk = take_batches(stream, state.step, length)
        state, output = program.advance(state, chunk)
        yield state, output


def _stream(batches: Iterable[PyTree]) -> Iterator[PyTree]:
    kind = type(batches).__name__
    try:
        if not isinstance(batches, Mapping):  # Iterating a batch yields names.
            return iter(batches)
    except TypeError:
        pass
    raise ValueError(
        f"batches is a {kind}, but must be an iterator of them, one for each step: "
        "itertools.repeat(batch), or the generator that a function gives when called"
    )


def scan_steps(program: RegionProgram, ahead: int) -> int:
    """Return how many of the steps ahead to do in one scan.

    Where scans are cut changes no number. On a CPU, where the length is an argument, a
    scan is at most as long as the one program that all lengths share. Elsewhere scans
    are as long as possible, to hide communication.
    """
    return min(ahead, program.length_bucket or MAX_SCAN_STEPS)


def take_batches(stream: Iterator[PyTree], step: int, num_steps: int) -> PyTree:
    """Stack the batches of the next T steps for one `advance`: leaves `[T, R, B, ...]`.

    `step`, the inner steps done, is for the error message.
    """
    taken = list(itertools.islice(stream, num_steps))
    if len(taken) < num_steps:
        raise ValueError(
            f"batches ended at step {step + len(taken)}, before the next cut at step "
            f"{step + num_steps}; give an endless iterator, or ask for fewer steps"
        )

    try:
        return jax.tree.map(lambda *x: np.stack(x), *taken)
    except ValueError as error:
        raise ValueError(
            f"batches of the steps {step + 1} to {step + num_steps} differ in shape, "
            f"and cannot be one scan ({error}): give all of them the same leaves and "
            "shapes, and leave out a last one that is smaller"
        ) from error
