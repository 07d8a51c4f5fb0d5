r"""`cocodc`, `cocodc_paper` (arXiv 2504.17672): compensation and adaptive transmission.

**When** (`schedules.adaptive`). There are N >= K syncs in H steps, so a slot every
$h = \lfloor H / N \rfloor$ steps. Each fragment starts within H steps, strictly: a slot
serves a fragment whose deadline is near. Else it serves one that was never sent, else
the fragment p of the highest score $R_p$. Let $d_p$ be its number of parameters, $I_p$
the steps between its last two starts, and $a_p$ those since the last:

$$
R_p = \frac{\lVert \Delta_p \rVert}{d_p \, I_p} \;\; \text{(pseudo_gradient)}, \qquad
\frac{\lVert \Delta_p \rVert \, a_p}{\sqrt{d_p} \, I_p} \;\; \text{(aged)}, \qquad
\sum_m \frac{\lVert \theta^g_p - \theta^m_p \rVert_1}{d_p \, a_p} \;\; \text{(drift)}
$$

$\Delta_p$ is the fragment's last mean pseudo-gradient; drift is measured at the slot.
Other scores are in `schedules.adaptive`.
With "auto", measured seconds $T_c$ of a step and $T_s$ of a sync give
$\tau = \lceil T_s / T_c \rceil$ and $N = \max(K, \lfloor \gamma H T_c / T_s \rfloor)$,
where gamma is `network_share`.

**What** (`merge.compensate`). A region sends $\Delta^m = \theta^g - \theta^m_t$ of the
fragment. Nesterov (`sync.outer.nesterov`) steps on the mean, $\tau$ steps later:

$$
v \leftarrow \mu v + \Delta, \qquad
\theta^g \leftarrow \theta^g - \eta \, (\Delta + \mu v)
$$

Then the region carries its own progress u, old minus new per step, over from the point
where it was made to the outer parameters, by a first-order Taylor expansion:

$$
\begin{align*}
u &= (\theta^m_t - \theta^m_{t+\tau}) / \tau \\
D &= \theta^g - \theta^m_t \\
\theta^m_{t+\tau} &\leftarrow \theta^g - \tau \, (\rho u + \lambda \, C(\rho u, D))
\end{align*}
$$

- `cocodc_paper`, rule "text": $C(u, D) = u \odot u \odot D / H$, lambda 0.5, rho 1. We
  are about 75 % sure of the place of 1/H. In parameter units the correction is about
  1e-7 of u (`correction_ratio`), so the method is the replay of the progress,
  `loscar`'s merge. It is the default: it is the formula of the paper.
- `cocodc_paper`, rule "code", as the authors run it, of a tensor with the progress
  $G = \tau u$ and $c = G \odot G \odot D / 0.0004$: $\theta^m_{t+\tau} \leftarrow
  \theta^g - G - \lambda_0 \, c \, \lVert G \rVert / (\lVert c \rVert + 10^{-8})$,
  $\lambda_0 = 1$, with "drift" as the score and a constant N. The correction is as long
  as the progress, and does not shrink as D does.
- `cocodc` (ours): $C(u, D) = D / \tau$, "isotropic", so $\theta^m_{t+\tau} \leftarrow
  \theta^g - \lambda D + \rho \, (\theta^m_{t+\tau} - \theta^m_t)$. It did best among
  the rules that need nothing else.
- Others are in `transforms.curvature`.

Source: CoCoDC, sections 3.1 and 3.2; rule, scores and compensation read from the
authors' code, N and gamma from memory, the units and the plus sign derived here.
Differs from the paper: a fragment in flight is never chosen again, and each starts
within H steps strictly (there a slot serves one fragment, whatever is overdue).
Defaults: published H 100, K 4, tau 5, N 8, eta 0.4, mu 0.9, lambda 0.5; `cocodc` has
lambda 0.3.
Measured here: at equal bytes, tau/H 0.2, each tuned, five seeds: isotropic 2.201,
"text" 2.295, "code" 2.281, mix(0.5) 2.191 (`experiments/grids/compensation.toml`). One
seed of the tiny preset: docs/results/archive/methods.md.
"""

import dataclasses
from typing import Any, Literal

import jax
import optax

from cocodc_jax.sync import Method, Sync, merge, nesterov, schedules
from cocodc_jax.sync.cutting import Strategy
from cocodc_jax.sync.schedules.adaptive import Score
from cocodc_jax.transforms import curvature as curvatures
from cocodc_jax.transforms.compensation import delay_compensation
from cocodc_jax.transforms.curvature import Curvature
from cocodc_jax.transforms.numerics import (
    check_at_least,
    check_between,
    check_choice,
    check_not_negative,
    check_number,
    check_unused,
    is_number,
)
from cocodc_jax.transforms.secant import secant


def cocodc(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 5,
    syncs_per_interval: int | str | None = None,
    transmission_score: Score = "pseudo_gradient",
    curvature: curvatures.Name | Literal["secant"] | Curvature = "isotropic",
    curvature_units: curvatures.Units | None = None,
    compensation_strength: float = 0.3,
    progress_weight: float = 1.0,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: Strategy = "strided",
    max_delay_steps: int | None = None,
    network_share: float | None = None,
    merge_feedback: bool = False,
) -> Method:
    """Build CoCoDC (arXiv 2504.17672): compensation and adaptive transmission.

    Args:
      sync_interval: H, inner steps in which every fragment starts at least once.
      num_fragments: K.
      delay_steps: tau, inner steps from a start to its merge; "auto"
        measures how long syncs take, see `schedules.measured`.
      syncs_per_interval: N, syncs in one interval of adaptive transmission, at least
        K; None is 2 K, the paper's 8 for 4, "auto" as many as the network carries.
      transmission_score: what ranks fragments: "pseudo_gradient", "aged", "rms",
        "drift", "gain", "disagreement", "load" (for mixtures of experts) or
        "round_robin"; see `schedules.adaptive`.
      curvature: what stands for the Hessian in the delay compensation, a name or a
        value of `transforms.curvature` ("outer_product" is the published one); or
        "secant", the isotropic one with a weight for each tensor from the two halves of
        the overlap (a strength of 0.5 to 1 did best).
      curvature_units: units of a curvature given by name; None is the paper's
        "parameter" for the diagonal forms and "adam" for products of the loss itself.
      compensation_strength: lambda, weight of the compensation's correction.
      progress_weight: rho, how much of its own progress during the delay a region
        keeps, in [0, 1]: g~ = rho g + lambda C(rho g, D). With the isotropic curvature
        and rho = lambda it is Streaming DiLoCo's mix with alpha = lambda. Without a
        delay regions take the outer parameters, whatever rho and lambda are.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential", "balanced" or "experts".
      max_delay_steps: the longest that "auto" may choose; None is about H.
      network_share: gamma in (0, 1], share of the network that an automatic N may use;
        None is 0.4.
      merge_feedback: whether the share 1 - rho of its progress that a region does not
        keep is added to its next message; needs messages with error feedback (ours).
    """
    check_at_least("sync_interval", sync_interval, 1)
    check_at_least("num_fragments", num_fragments, 1)
    check_number("compensation_strength", compensation_strength)
    if callable(compensation_strength):
        raise ValueError(
            f"compensation_strength={compensation_strength!r} must be a number: every "
            "merge starts the compensation afresh, so that a schedule would stay at 0"
        )
    chosen = _curvature(curvature, curvature_units, sync_interval)
    if syncs_per_interval is None:
        syncs_per_interval = min(2 * num_fragments, sync_interval)
    check_between("progress_weight", progress_weight, 0, 1)
    is_partial = not is_number(progress_weight) or progress_weight != 1
    compensation = delay_compensation(chosen, compensation_strength)
    if "later_gradient" in chosen.needs:
        if is_partial and is_number(progress_weight):
            raise ValueError(
                f"progress_weight={progress_weight} must be 1 with curvature='secant', "
                "which is fitted to all of the progress"
            )
    elif is_partial:
        compensation = optax.chain(optax.scale(progress_weight), compensation)
    rule = merge.compensate(compensation, chosen.needs)
    if merge_feedback:
        rule = merge.remembering(rule, progress_weight)

    schedule = schedules.adaptive(
        sync_interval=sync_interval,
        num_fragments=num_fragments,
        delay_steps=delay_steps,
        syncs_per_interval=syncs_per_interval,
        transmission_score=transmission_score,
        max_delay_steps=max_delay_steps,
        network_share=network_share,
    )
    sync = Sync(
        schedule=schedule,
        outer=nesterov(outer_lr, outer_momentum),
        merge=rule,
        fragment_strategy=fragment_strategy,
    )
    return Method(name="cocodc", sync=sync)


def cocodc_paper(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 5,
    syncs_per_interval: int | str | None = None,
    compensation_strength: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: Strategy = "strided",
    max_delay_steps: int | None = None,
    network_share: float | None = None,
    rule: Literal["text", "code"] = "text",
    relative_strength: float | None = None,
) -> Method:
    """Build CoCoDC as its paper has it, or as its authors' code (arXiv 2504.17672).

    Args:
      sync_interval: H, inner steps in which every fragment starts at least once.
      num_fragments: K.
      delay_steps: tau, inner steps from a start to its merge, or "auto".
      syncs_per_interval: N, syncs in one interval, or "auto"; None is 2 K.
      compensation_strength: lambda of the rule "text", the weight of the correction.
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: "strided", "sequential" or "balanced".
      max_delay_steps: the longest that "auto" may choose; None is about H.
      network_share: gamma in (0, 1], the share of the network that N "auto" may use;
        None is 0.4.
      rule: of CoCoDC, "text" or "code": g * g * D / H and the change rate of the last
        means; or as its authors run it, the normalised correction and "drift".
      relative_strength: lambda_0 of the rule "code", length of the correction of a
        tensor over that of its progress; None is 1.
    """
    check_choice("rule", rule, ("text", "code"))
    if rule == "text":
        check_unused("relative_strength", relative_strength, None, "rule='text'")
        score = "pseudo_gradient"
        curvature = "outer_product"
        strength = compensation_strength
    else:
        check_unused("compensation_strength", compensation_strength, 0.5, "rule='code'")
        score = "drift"
        curvature = _as_coded()
        strength = 1.0 if relative_strength is None else relative_strength
        check_not_negative("relative_strength", strength)

    method = cocodc(
        sync_interval=sync_interval,
        num_fragments=num_fragments,
        delay_steps=delay_steps,
        syncs_per_interval=syncs_per_interval,
        transmission_score=score,
        curvature=curvature,
        compensation_strength=strength,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        fragment_strategy=fragment_strategy,
        max_delay_steps=max_delay_steps,
        network_share=network_share,
    )
    return dataclasses.replace(method, name="cocodc_paper")


def _as_coded() -> Curvature:
    """Return the authors' correction, whose norms are of the undivided progress."""
    # Their c is divided by 4e-4, a constant of the code, and guarded by 1e-8.
    normalized = curvatures.normalized_outer_product(scope="layer", eps=1e-8 * 4e-4)

    def product(
        gradient: Any, displacement: Any, *, delay_steps: int | jax.Array
    ) -> Any:
        progress = jax.tree.map(lambda u: u * delay_steps, gradient)
        curved = normalized.product(progress, displacement)
        return jax.tree.map(lambda c: c / delay_steps, curved)

    return Curvature(normalized.name, product, frozenset({"delay_steps"}))


def _curvature(
    curvature: str | Curvature, units: str | None, sync_interval: int
) -> Curvature:
    """Return a curvature whose product is in parameter units, as the merge needs it."""
    if not isinstance(curvature, str):
        if units is not None:
            raise ValueError(
                f"curvature_units={units!r} was given, but curvature="
                f"{curvature.name!r} is made already; choose its units there"
            )
        return curvature

    check_choice("curvature", curvature, (*curvatures.NAMES, "secant"))
    options: dict[str, Any] = {} if units is None else {"units": units}
    if curvature == "outer_product":
        options["sync_interval"] = sync_interval
    if curvature in ("hessian_vector", "gauss_newton", "hutchinson"):
        options.setdefault("units", "adam")

    try:
        if curvature == "secant":
            # More than the whole of D would go past the staged point.
            return secant(curvatures.isotropic(), max_weight=1.0, **options)
        return curvatures.get(curvature, **options)
    except TypeError:
        raise ValueError(
            f"curvature_units={units!r} was given, but curvature={curvature!r} has no "
            "choice of units; leave it out"
        ) from None
    except ValueError as error:
        if units is None:
            raise
        raise ValueError(
            f"curvature_units={units!r} is not for curvature={curvature!r}: {error}"
        ) from None
