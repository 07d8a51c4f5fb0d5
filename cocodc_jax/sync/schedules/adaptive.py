"""Adaptive transmission: each slot serves the fragment that changes fastest.

N >= K slots in H steps, h = floor(H / N) apart. With R_p the change rate of fragment p
(a *score*, see `adaptive`) and d_p the slots that may pass before p must have started,

    p = the earliest deadline, if j fragments are due within some j slots;
        else one never sent;  else argmax R_p, ties to the one that waits longest

Source: CoCoDC (arXiv 2504.17672, section 3.2). The rule, both measures of the rate and
the later score were read from the authors' code; N from the network is from memory.
What differs from the paper is in `methods.cocodc`.

Scores come from reduced values only (`base.py`): the mean pseudo-gradients of applied
syncs, or gaps between outer and local parameters that are reduced over regions. Those
of a fragment of n parameters, with D the last applied mean pseudo-gradient, I the steps
that it was accumulated over, a the steps since p's last start, and theta^g - theta^m
the gap of region m now:

    pseudo_gradient   ||D|| / n / I                      the paper's: favors small ones
    aged              ||D|| / sqrt(n) a / I              the authors' later one
    rms               ||D|| / sqrt(n) / I                independent of the size
    drift             sum_m mean |theta^g - theta^m| / a
    gain              mean_m ||theta^g - theta^m||^2 / n gap closed per byte
    disagreement      gain - (||D|| / sqrt(n) a / I)^2   its part that regions do not
                                                         share, by their last progress
    load              ||D|| / sqrt(n) t / I              of experts, see below
    round_robin       a                                  the control: no choice at all

rms, gain, disagreement, load and round_robin are ours, for ablation; bytes are
proportional to n. `load` is aged times the share of the tokens that need the fragment:
t is the number of batches whose tokens its experts saw in the regions' progress, mean
over its experts and the regions; a fragment without experts sees all tokens, t = a. The
exact disagreement is the variance of messages, mean_m ||Delta^m||^2 - ||mean Delta||^2.
Here the second term is extrapolated, so that only K numbers are sent.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

import numpy as np

from cocodc_jax.sync.schedules.base import (
    Applied,
    Event,
    Observe,
    ScheduleState,
    replaced,
)
from cocodc_jax.sync.schedules.slotted import Slotted, free_fragments
from cocodc_jax.transforms.numerics import check_choice

Score = Literal[
    "pseudo_gradient",
    "aged",
    "rms",
    "drift",
    "gain",
    "disagreement",
    "load",
    "round_robin",
]
SCORES = get_args(Score)

# What each score is computed from.
_NEEDS: dict[Score, frozenset[str]] = {
    "pseudo_gradient": frozenset({"norm"}),
    "aged": frozenset({"norm"}),
    "rms": frozenset({"norm"}),
    "drift": frozenset({"drift"}),
    "gain": frozenset({"distance"}),
    "disagreement": frozenset({"distance", "norm"}),
    "load": frozenset({"tokens", "norm"}),
    "round_robin": frozenset(),
}


@dataclasses.dataclass(frozen=True)
class AdaptiveState(ScheduleState):
    """State of adaptive transmission; tuples have one entry per fragment."""

    # Steps between the last two starts (from step 0 for the first).
    interval: tuple[int, ...]
    # L2 norm of the last applied mean pseudo-gradient, 0 before the first.
    norm: tuple[float, ...]
    # Parameters in the fragment, 0 before its first sync was applied.
    size: tuple[int, ...]
    observed_interval: tuple[int, ...]  # The interval that `norm` was accumulated over.


@dataclasses.dataclass(frozen=True)
class Adaptive(Slotted):
    """Slots serve the fragment that changes fastest; see `adaptive`."""

    transmission_score: Score = "pseudo_gradient"

    def __post_init__(self):
        check_choice("transmission_score", self.transmission_score, SCORES)
        super().__post_init__()

    @property
    def needs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Needs of its score."""
        return _NEEDS[self.transmission_score]

    def init(self) -> AdaptiveState:
        """Return the state before the first step."""
        none = (0,) * self.num_fragments
        return AdaptiveState(
            step=0,
            in_flight=(),
            last_start=(-1,) * self.num_fragments,
            interval=none,
            norm=(0.0,) * self.num_fragments,
            size=none,
            observed_interval=none,
        )

    def learn(self, state: AdaptiveState, applied: Applied) -> AdaptiveState:
        """Return the state with the norm of an applied mean."""
        k = applied.fragment_id
        return dataclasses.replace(
            state,
            norm=replaced(state.norm, k, applied.seen.get("norm", 0.0)),
            size=replaced(state.size, k, applied.num_params),
            observed_interval=replaced(state.observed_interval, k, state.interval[k]),
        )

    def departed(
        self, state: AdaptiveState, step: int, fragment_id: int, delay_steps: int
    ) -> tuple[AdaptiveState, Event]:
        """Return the start of a fragment, and the state with its interval."""
        state, event = super().departed(state, step, fragment_id, delay_steps)
        interval = replaced(state.interval, fragment_id, step - event.since_step)
        return dataclasses.replace(state, interval=interval), event

    def serve(
        self, state: AdaptiveState, step: int, observe: Observe, slot_steps: int
    ) -> tuple[AdaptiveState, int | None]:
        """Return the fragment with the earliest deadline or the highest score."""
        if "norm" in self.needs:
            for applied in observe("applied"):
                state = self.learn(state, applied)

        free = np.isin(np.arange(self.num_fragments), free_fragments(self, state))
        if not free.any():
            return state, None

        last_start = np.array(state.last_start)
        chosen = int(self.forced(np, free, last_start, step, slot_steps))
        if chosen == self.num_fragments:
            scores = self.scores(np, state, state.size, step, observe)
            chosen = int(highest(np, free, last_start, scores))

        return state, chosen

    def forced(
        self, xp: Any, free: Any, last_start: Any, step: Any, slot_steps: int
    ) -> Any:
        """Return the fragment that is chosen regardless of scores."""
        since = xp.maximum(last_start, 0)
        due = (since + self.sync_interval - step) // slot_steps
        # j + 1 or more fragments must start within the next j + 1 slots.
        is_tight = ((due[None, :] <= due[:, None]).sum(1) > due).any()
        never = free & (last_start < 0)
        first = xp.where(never.any(), xp.argmax(never), len(free))
        # By deadlines, not slots: one slot may have several.
        return xp.where(is_tight, _least(xp, free, since), first)

    def scores(
        self, xp: Any, state: Any, size: Any, step: Any, observe: Observe
    ) -> Any:
        """Return the score of each fragment `[K]`, see the module.

        `state` is an `AdaptiveState`, or `traced.Times`; `size` has the parameters.
        """
        kind = self.transmission_score
        age = step - xp.asarray(state.last_start)
        if kind == "round_robin":
            return age
        if kind == "drift":
            return xp.asarray(observe("drift")) / age
        if kind == "gain":
            return xp.asarray(observe("distance"))

        # A fragment whose first sync is in flight has norm 0.
        size = xp.maximum(xp.asarray(size), 1)
        norm = xp.asarray(state.norm)
        interval = xp.maximum(xp.asarray(state.observed_interval), 1)
        if kind == "pseudo_gradient":
            return norm / size / interval

        if kind == "load":
            tokens = xp.asarray(observe("tokens"))
            age = xp.where(tokens < 0, age, tokens)

        moved = norm / xp.sqrt(size) * (1 if kind == "rms" else age) / interval
        if kind == "disagreement":
            return xp.asarray(observe("distance")) - moved**2
        return moved


def highest(xp: Any, free: Any, last_start: Any, scores: Any) -> Any:
    """Return the free fragment of the highest score; ties to the longest wait."""
    scores = xp.where(free, scores, -xp.inf)
    # Not `==`: NaN scores are ties.
    return _least(xp, free & ~(scores < scores.max()), last_start)


def _least(xp: Any, mask: Any, values: Any) -> Any:
    """Return the first index of the minimum where the mask is true."""
    return xp.argmin(xp.where(mask, values, 2**31 - 1))


def syncs_that_fit(
    sync_interval: int,
    num_fragments: int,
    step_time: float,
    sync_time: float,
    network_share: float,
) -> int:
    """Return N = min(H, max(K, floor(gamma H T_c / T_s))), CoCoDC's syncs."""
    if step_time <= 0 or sync_time <= 0:
        raise ValueError(
            f"step_time={step_time} and sync_time={sync_time} must be positive seconds"
        )
    if not 0 < network_share <= 1:
        raise ValueError(f"network_share={network_share} must be in (0, 1]")
    fit = math.floor(network_share * sync_interval * step_time / sync_time)
    return min(max(num_fragments, fit), sync_interval)
