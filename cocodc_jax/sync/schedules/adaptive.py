"""Adaptive transmission: each slot serves the fragment that changes fastest.

N >= K slots in H steps, h = floor(H / N) apart. With R_p the change rate of fragment p
(a *score*, see `adaptive`) and d_p the slots that may pass before p must have started,

    p = the earliest deadline, where the fragments due within some j slots number j;
        else one never sent;  else argmax R_p, and of equals the one that waits longest

Source: CoCoDC (arXiv 2504.17672, section 3.2). The rule, both measures of the rate and
the later score were read from the authors' code; N from the network is from memory.
Differs from the paper: a fragment in flight is never chosen again, and the deadline is
strict (there, it is looked at in a slot only, and one slot serves one fragment, so that
fragments can exceed H).

Every region must choose alike, or its collectives would pair with the wrong ones and
hang. So scores come from reduced values only: the mean pseudo-gradients of syncs that
are applied, or gaps between outer and local parameters that are reduced over regions.

The scores of a fragment of n parameters, D being the last mean pseudo-gradient that was
applied, I the steps that it was gathered over, a those since p's last start, and
theta^g - theta^m the gap of region m now:

    pseudo_gradient   ||D|| / n / I                      the paper's: favours small ones
    aged              ||D|| / sqrt(n) a / I              the authors' later one
    rms               ||D|| / sqrt(n) / I                a rate that no size decides
    drift             sum_m mean |theta^g - theta^m| / a
    gain              mean_m ||theta^g - theta^m||^2 / n what one byte would bring over
    disagreement      gain - (||D|| / sqrt(n) a / I)^2   and of it what regions do not
                                                         share, by their last progress
    round_robin       a                                  the control: no choice at all

rms, gain, disagreement and round_robin are ours, for ablation; bytes go with n. The
exact disagreement is the variance of messages, mean_m ||Delta^m||^2 - ||mean Delta||^2;
here the second term is extrapolated, so that K numbers cross and no parameters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from cocodc_jax.sync.schedules.base import (
    Applied,
    Observe,
    ScheduleState,
    check_at_least,
    replaced,
)
from cocodc_jax.sync.schedules.slotted import Slotted, free_fragments

# What each score is made of.
_NEEDS = {
    "pseudo_gradient": frozenset({"norm"}),
    "aged": frozenset({"norm"}),
    "rms": frozenset({"norm"}),
    "drift": frozenset({"drift"}),
    "gain": frozenset({"distance"}),
    "disagreement": frozenset({"distance", "norm"}),
    "round_robin": frozenset(),
}
SCORES = tuple(_NEEDS)


@dataclasses.dataclass(frozen=True)
class AdaptiveState(ScheduleState):
    """What adaptive transmission remembers; tuples have an entry a fragment.

    Attributes:
      interval: steps between the last two starts (from step 0 for the first).
      norm: L2 norm of the last applied mean pseudo-gradient, 0 before the first.
      size: parameters in the fragment, 0 before its first sync was applied.
      observed_interval: the interval that `norm` was gathered over.
    """

    interval: tuple[int, ...]
    norm: tuple[float, ...]
    size: tuple[int, ...]
    observed_interval: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Adaptive(Slotted):
    """Slots serve what changes fastest; see `adaptive`.

    Attributes:
      transmission_score: one of `SCORES`.
    """

    transmission_score: str = "pseudo_gradient"

    def __post_init__(self):
        """Check the numbers and the score.

        Raises:
          ValueError: naming the field, its value and what would be right.
        """
        _check_score(self.transmission_score)
        super().__post_init__()

    @property
    def needs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What its score is made of."""
        return _NEEDS[self.transmission_score]

    def init(self) -> AdaptiveState:
        """Return the state before the first step."""
        none = (0,) * self.num_fragments
        never, zeros = (-1,) * self.num_fragments, (0.0,) * self.num_fragments
        return AdaptiveState(0, (), never, none, zeros, none, none)

    def restore(self, value: dict) -> AdaptiveState:
        """Return the state that `to_json` was called on."""
        return AdaptiveState.from_json(value)

    def learn(self, state: AdaptiveState, applied: Applied) -> AdaptiveState:
        """Return the state that knows the norm of an applied mean."""
        k = applied.fragment_id
        return dataclasses.replace(
            state,
            norm=replaced(state.norm, k, applied.seen.get("norm", 0.0)),
            size=replaced(state.size, k, applied.num_params),
            observed_interval=replaced(state.observed_interval, k, state.interval[k]),
        )

    def departed(self, state, step, fragment_id, delay_steps):
        """Return the start of a fragment; it also remembers the interval."""
        state, event = super().departed(state, step, fragment_id, delay_steps)
        interval = replaced(state.interval, fragment_id, step - event.since_step)
        return dataclasses.replace(state, interval=interval), event

    def serve(self, state, step, observe: Observe, slot_steps: int):
        """Return the fragment with the earliest deadline or the highest score."""
        for applied in observe("applied") if "norm" in self.needs else ():
            state = self.learn(state, applied)
        free = free_fragments(self, state)
        if not free:
            return state, None
        due = [
            (max(start, 0) + self.sync_interval - step) // slot_steps
            for start in state.last_start
        ]
        if _is_tight(due):
            # By deadlines themselves: in one slot may fall several.
            return state, min(free, key=lambda p: (max(state.last_start[p], 0), p))
        never = [p for p in free if state.last_start[p] < 0]
        if never:
            return state, never[0]
        scores = self._scores(state, step, observe)
        return state, max(free, key=lambda p: (scores[p], -state.last_start[p], -p))

    def _scores(self, state: AdaptiveState, step: int, observe: Observe) -> list[float]:
        age = [step - start for start in state.last_start]
        each = range(self.num_fragments)
        if self.transmission_score == "round_robin":
            return [float(a) for a in age]
        if self.transmission_score == "drift":
            return [d / a for d, a in zip(observe("drift"), age, strict=True)]
        if self.transmission_score == "gain":
            return list(observe("distance"))
        if self.transmission_score == "disagreement":
            gaps = observe("distance")
            return [gaps[p] - self._moved(state, p, age[p]) ** 2 for p in each]
        steps = age if self.transmission_score == "aged" else [1] * len(age)
        return [self._moved(state, p, steps[p]) for p in each]

    def _moved(self, state: AdaptiveState, p: int, steps: int) -> float:
        """Return how far a fragment moves in so many steps, by the last mean of it."""
        if not state.size[p]:  # Sent once but not yet back: nothing is known.
            return 0.0
        interval = state.observed_interval[p]
        if self.transmission_score == "pseudo_gradient":
            return state.norm[p] / state.size[p] / interval
        return state.norm[p] / math.sqrt(state.size[p]) * steps / interval


def adaptive(
    sync_interval: int,
    num_fragments: int,
    delay_steps: int,
    syncs_per_interval: int,
    transmission_score: str = "pseudo_gradient",
) -> Adaptive:
    """Start `syncs_per_interval` syncs in each interval, of what changes fastest.

    Args:
      sync_interval: H, the strict limit between two starts of a fragment.
      num_fragments: K.
      delay_steps: tau.
      syncs_per_interval: N, at least K; see `syncs_that_fit`.
      transmission_score: one of `SCORES`, as the module says: "pseudo_gradient" (the
        paper's rate), "aged" (the authors' later score, which grows while a fragment
        waits), "rms", "drift", "gain", "disagreement", or "round_robin", which chooses
        nothing.

    Raises:
      ValueError: naming the argument, its value and what would be right.
    """
    _check_score(transmission_score)
    check_at_least("num_fragments", num_fragments, 1)
    check_at_least("sync_interval", sync_interval, 1)
    check_at_least("syncs_per_interval", syncs_per_interval, 0)
    if not num_fragments <= syncs_per_interval <= sync_interval:
        raise ValueError(
            f"syncs_per_interval={syncs_per_interval} must be at least num_fragments="
            f"{num_fragments} and at most sync_interval={sync_interval}"
        )
    slot_steps = sync_interval // syncs_per_interval
    return Adaptive(
        num_fragments,
        sync_interval,
        delay_steps,
        slot_steps,
        transmission_score=transmission_score,
    )


def syncs_that_fit(
    sync_interval: int,
    num_fragments: int,
    step_time: float,
    sync_time: float,
    network_share: float,
) -> int:
    """Return N = max(K, floor(gamma H T_c / T_s)), CoCoDC's syncs in one interval.

    Args:
      sync_interval: H in steps.
      num_fragments: K.
      step_time: T_c, seconds of one inner step.
      sync_time: T_s, seconds of one fragment's sync.
      network_share: gamma in (0, 1], the share of the network that may be used.

    Raises:
      ValueError: if a time is not positive or the share is outside (0, 1].
    """
    if step_time <= 0 or sync_time <= 0:
        raise ValueError(
            f"step_time={step_time} and sync_time={sync_time} must be positive seconds"
        )
    if not 0 < network_share <= 1:
        raise ValueError(f"network_share={network_share} must be in (0, 1]")
    fit = math.floor(network_share * sync_interval * step_time / sync_time)
    return min(max(num_fragments, fit), sync_interval)


def _is_tight(due: Sequence[int]) -> bool:
    """Whether j + 1 or more fragments must start within the next j + 1 slots."""
    return any(sum(d <= j for d in due) > j for j in set(due))


def _check_score(score: str) -> None:
    if score not in SCORES:
        raise ValueError(
            f"transmission_score={score!r} is unknown; use one of {SCORES}"
        )
