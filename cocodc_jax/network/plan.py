"""Choose collective, order, K, H, N and tau for a network, with reasons.

With T_c seconds of a step and T_s seconds of one fragment's sync (CoCoDC, arXiv
2504.17672, adaptive transmission):

    tau >= ceil(T_s / T_c)                        a fragment arrives before its merge
    H >= ceil(K T_s / (gamma T_c))                K fragments fit the network in H steps
    H mod K = 0                                   they start evenly spread over it
    N = max(K, floor(gamma H T_c / T_s))          the rest of the share is used as well

K is raised while tau is longer than the delays that are known to be harmless; gamma is
the share of the network's time that may be used. Differs from the paper: N is at most
floor(H / tau), because syncs start every floor(H / N) steps, which can be much less
than H / N, and syncs that start within tau of each other share the links and arrive
late.
"""

import dataclasses
import math

from cocodc_jax.network.collectives import Order, best_order, collective_cost
from cocodc_jax.network.links import Topology, check
from cocodc_jax.network.simulator import simulate
from cocodc_jax.network.workload import Workload
from cocodc_jax.sync.schedules import adaptive

HARMLESS_DELAY_STEPS = 10  # Streaming DiLoCo, arXiv 2501.18512: up to 10 harmless


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job to plan for.

    Attributes:
      model_bytes: bytes of one region's message for the whole model, as encoded.
      step_time_s: seconds of an inner step in the slowest region.
      num_fragments: the desired K; the plan may raise it.
      max_fragments: the largest K, at most the number of transformer blocks.
      sync_interval: the desired H; the plan may raise it.
      network_share: gamma, in (0, 1].
      max_delay_steps: the longest desired tau.
      collectives: to choose from.
    """

    model_bytes: float
    step_time_s: float
    num_fragments: int = 4
    max_fragments: int = 32
    sync_interval: int = 100
    network_share: float = 0.4
    max_delay_steps: int = HARMLESS_DELAY_STEPS
    collectives: tuple[str, ...] = ("ring", "tree", "pairs")

    def __post_init__(self):
        for name in ("model_bytes", "step_time_s"):
            value = getattr(self, name)
            check(0 < value < math.inf, name, value, "positive")

        for name in ("num_fragments", "sync_interval", "max_delay_steps"):
            check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        if self.max_fragments < self.num_fragments:
            raise ValueError(
                f"max_fragments={self.max_fragments} must not be below num_fragments="
                f"{self.num_fragments}"
            )

        share = self.network_share
        check(0 < share <= 1, "network_share", share, "in (0, 1]")


@dataclasses.dataclass(frozen=True)
class NetworkPlan:
    """The choices for a network, and their reasons.

    Attributes:
      collective: the cheapest of `Job.collectives`.
      order: order of the regions in it.
      num_fragments: K.
      sync_interval: H, in steps.
      syncs_per_interval: N, for CoCoDC; Streaming DiLoCo sends K.
      delay_steps: tau.
      sync_time_s: T_s, seconds of one fragment's sync.
      utilization: simulated share of time spent computing, with CoCoDC's schedule.
      reasons: one sentence or two for each choice.
    """

    collective: str
    order: Order
    num_fragments: int
    sync_interval: int
    syncs_per_interval: int
    delay_steps: int
    sync_time_s: float
    utilization: float
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """Return the reasons as plain text, one line each."""
        return "\n".join(f"- {reason}" for reason in self.reasons)


def make_plan(topology: Topology, job: Job) -> NetworkPlan:
    """Choose a plan for the links without their changes over time.

    Raises:
      ValueError: if there is only one region, which needs no network.
    """
    if topology.num_regions < 2:
        raise ValueError("a plan needs at least two regions")
    topology = topology.undisturbed

    # K is found with the collective that suits the K asked for; smaller fragments may
    # suit another one, which can only be faster.
    collective, order, _ = _collective(topology, job, job.num_fragments)
    num = _fragments(topology, job, collective, order)
    collective, order, why_collective = _collective(topology, job, num)

    sync_s = _sync_s(topology, job.model_bytes / num, collective, order)
    delay = max(1, math.ceil(sync_s / job.step_time_s - 1e-9))
    interval, why_interval = _interval(job, num, sync_s, delay)
    fit = math.floor(job.network_share * interval * job.step_time_s / sync_s + 1e-9)
    syncs = max(num, min(fit, interval // delay))

    work = Workload(
        fragment_bytes=(job.model_bytes / num,) * num,
        step_time_s=(job.step_time_s,) * topology.num_regions,
    )
    schedule = adaptive(interval, num, delay, syncs)
    timeline = simulate(
        topology,
        work,
        schedule,
        num_steps=3 * interval,
        collective=collective,
        order=order,
    )
    usage = timeline.utilization(since_step=interval)

    reasons = (
        why_collective,
        _explain_fragments(job, num, sync_s),
        why_interval,
        f"tau = {delay} steps: a sync takes {sync_s:.3g} s, a step "
        f"{job.step_time_s:.3g} s, so it arrives within {delay} steps.",
        f"N = {syncs} syncs per {interval} steps (CoCoDC): {fit} would fit in "
        f"{job.network_share:.0%} of the network's time, {interval // delay} without "
        f"two under way at once, and each of the {num} fragments goes at least once; "
        f"Streaming DiLoCo sends {num}.",
        f"Simulated compute utilization: {usage:.1%}.",
    )

    return NetworkPlan(
        collective=collective,
        order=order,
        num_fragments=num,
        sync_interval=interval,
        syncs_per_interval=syncs,
        delay_steps=delay,
        sync_time_s=sync_s,
        utilization=usage,
        reasons=reasons,
    )


def _sync_s(topology: Topology, size: float, collective: str, order: Order) -> float:
    return collective_cost(topology.at(), collective, size, order).seconds


def _collective(topology: Topology, job: Job, num: int) -> tuple[str, Order, str]:
    """Return the cheapest collective for one of `num` fragments, its order, and why."""
    size = job.model_bytes / num
    orders = {n: best_order(topology.at(), n, size) for n in job.collectives}
    seconds = {n: _sync_s(topology, size, n, order) for n, order in orders.items()}
    best = min(seconds, key=seconds.__getitem__)
    listed = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    path = ", ".join(topology.regions[i] for i in orders[best])
    reason = (
        f"All-reduce as {best}, in the order {path}: the cheapest for a fragment of "
        f"{size / 1e6:,.4g} MB ({listed}, each in its best order)."
    )

    return best, orders[best], reason


def _fragments(topology: Topology, job: Job, collective: str, order: Order) -> int:
    """Return the least K, from the desired one up, with which syncs are in time."""
    limit_s = job.max_delay_steps * job.step_time_s
    for num in range(job.num_fragments, job.max_fragments):
        if _sync_s(topology, job.model_bytes / num, collective, order) <= limit_s:
            return num
    return job.max_fragments


def _explain_fragments(job: Job, num: int, sync_s: float) -> str:
    limit_s = job.max_delay_steps * job.step_time_s
    limit = f"{job.max_delay_steps} steps ({limit_s:.3g} s)"
    if sync_s > limit_s:
        return (
            f"K = {num} fragments, the most allowed, and a sync still takes "
            f"{sync_s:.4g} s, more than {limit}: compress more, or expect the delay to "
            "cost loss."
        )
    if num > job.num_fragments:
        return (
            f"K = {num} fragments instead of {job.num_fragments}: the fewest with "
            f"which a sync ({sync_s:.3g} s) fits in {limit}."
        )

    return f"K = {num} fragments, no more needed: a sync takes {sync_s:.3g} s."


def _interval(job: Job, num: int, sync_s: float, delay: int) -> tuple[int, str]:
    """Return H, the desired or the least that fits, a multiple of K, and why."""
    share = job.network_share
    fitting = math.ceil(num * sync_s / (share * job.step_time_s) - 1e-9)
    needed = max(fitting, num * delay, delay + 1)
    interval = math.ceil(max(needed, job.sync_interval) / num) * num
    usage = num * sync_s / (interval * job.step_time_s)
    used = f"{num} syncs use {usage:.1%} of the network's time, of {share:.0%} allowed."

    why = f" instead of {job.sync_interval}, a multiple of {num}: {used}"
    if interval == job.sync_interval:
        why = f", no more needed: {used}"
    elif needed > job.sync_interval:
        why = (
            f" instead of {job.sync_interval}: the least multiple of {num} in which "
            f"{num} syncs of {sync_s:.3g} s fit in {share:.0%} of the network's time "
            "and each arrives before its fragment is sent again."
        )

    return interval, f"H = {interval} steps{why}"
