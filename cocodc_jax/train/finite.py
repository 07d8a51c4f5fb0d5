"""Checks for non-finite values, which end a run or restore a region.

A finite loss does not rule them out.
"""

import contextlib
from typing import NoReturn

import numpy as np

from cocodc_jax.core.state import AppliedSync, TrainState
from cocodc_jax.engine import transfer
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.sync.robust import reasons_of
from cocodc_jax.train.checkpoint import CheckpointError, Checkpoints


class NonFiniteLossError(ArithmeticError):
    """A loss, a parameter or a message became NaN or infinite."""

    step: int | None = None  # Inner steps done by then.
    region: int | None = None  # In which it was; None if not in a single one.


class FiniteWatch:
    """Checks for non-finite numbers; its errors name where they are."""

    def __init__(self, program: RegionProgram, checkpoints: Checkpoints | None):
        self._program = program
        self._checkpoints = checkpoints

    def check_losses(
        self, first_step: int, losses: np.ndarray, first_region: int
    ) -> None:
        """End the run at a non-finite loss, unless the method restores regions."""
        bad = np.argwhere(~np.isfinite(losses)).tolist()
        if bad and not self._program.method.can_restore:
            i, m = bad[0]
            self.stop(f"loss is {losses[i, m]}", first_step + i + 1, first_region + m)

    def check_sync(self, sync: AppliedSync, state: TrainState) -> None:
        """End the run at a merge that is not finite; later losses may be finite."""
        k = sync.fragment_id
        if sync.verdict is not None:
            left_out = reasons_of(np.asarray(sync.verdict))
            if len(left_out) == self._program.regions.num:
                reasons = [f"region {m}: {reason}" for m, reason in left_out.items()]
                why = ", ".join(reasons)
                fault = f"no message of fragment {k} was fit for a mean ({why})"
                self.stop(fault, sync.apply_step, "all regions")

        ratios = sync.metrics.get("correction_ratio")
        if ratios is not None and sync.verdict is None:
            (bad,) = np.nonzero(~np.isfinite(transfer.local_rows(ratios)))
            if len(bad):
                region = transfer.first_local_row(ratios) + int(bad[0])
                fault = f"correction_ratio of fragment {k} is not finite"
                self.stop(fault, sync.apply_step, region)

        if not np.isfinite(float(sync.norm)):
            finite = np.asarray(self._program.finite_regions(state))
            where = "the mean of all regions"  # Which may be merged in all of them.
            if 0 < sum(finite) < len(finite):
                where = int(finite.argmin())
            fault = f"pseudo_gradient_norm of fragment {k} is not finite"
            self.stop(fault, sync.apply_step, where)

    def restored(self, state: TrainState) -> TrainState:
        """Restore regions whose parameters are not finite, or end the run."""
        is_bad = ~np.asarray(self._program.finite_regions(state))
        (bad,) = np.nonzero(is_bad)
        if not len(bad):
            return state
        if self._program.method.can_restore and len(bad) < self._program.regions.num:
            return self._program.restore_regions(state, is_bad)
        self.stop("a parameter is not finite", state.step, int(bad[0]))

    def stop(self, fault: str, step: int, where: int | str) -> NoReturn:
        """Raise the error that ends the run; it names the checkpoint to go back to.

        Args:
          fault: what is not finite, in words.
          step: after which.
          where: index of the region, or words for several.
        """
        saved = None
        if self._checkpoints:
            with contextlib.suppress(CheckpointError):  # It failed: an earlier one is.
                self._checkpoints.wait()
            saved = self._checkpoints.latest_step

        if isinstance(where, int):  # An elastic program has one region.
            where = getattr(self._program.exchange, "region", where)
        last_good = "there is none" if saved is None else f"step {saved}"
        place = f"region {where}" if isinstance(where, int) else where
        error = NonFiniteLossError(
            f"{fault} at step {step} in {place}; last good checkpoint: {last_good}. "
            "Lower inner_lr or outer_lr, or clip gradients (grad_clip)"
        )
        error.step = step
        error.region = where if isinstance(where, int) else None
        raise error
