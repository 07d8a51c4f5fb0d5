"""How often a run logs, evaluates and saves, and where its scans are cut for that."""

from __future__ import annotations

import dataclasses

from cocodc_jax.core.state import TrainState
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.train.run_steps import scan_steps


@dataclasses.dataclass(frozen=True)
class Cadence:
    """How often things happen, in inner steps; 0 is only at the end.

    Attributes:
      log_every: steps that one training record averages over, at least 1.
      eval_every: steps between evaluations.
      checkpoint_every: steps between checkpoints.
    """

    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0

    def __post_init__(self):
        """Validate the numbers."""
        if self.log_every < 1:
            raise ValueError(f"log_every={self.log_every} must be at least 1 step")
        for name in ("eval_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 0 (0 is never)"
                )

    def steps_to_cut(
        self, program: RegionProgram, state: TrainState, num_steps: int
    ) -> int:
        """Return the inner steps to dispatch at once: up to the next thing that is due.

        Args:
          program: of the run.
          state: current state.
          num_steps: the step that the run ends at.
        """
        ahead = [num_steps - state.step]
        event = program.steps_to_event(state)
        if event is not None:
            ahead.append(event)
        every = (self.eval_every, self.checkpoint_every)
        # Without events, long scans would delay records.
        every += () if event is not None else (self.log_every,)
        ahead.extend(n - state.step % n for n in every if n)
        schedule = program.method.schedule
        num_steps = scan_steps(program, min(ahead))
        if program.length_bucket or schedule is None or not schedule.is_measured:
            return num_steps
        # Events may be any number of steps apart, and every scan length is a
        # program of its own: use powers of two.
        return 1 << (num_steps.bit_length() - 1)


EVERY_TEN = Cadence()  # Records only, until the end.


def is_due(every: int, step: int, last: int) -> bool:
    """Return whether something that happens every so many steps is due now."""
    return step == last or (every > 0 and step % every == 0)
