r"""`streaming_diloco` (arXiv 2501.18512): fragments one by one, while the steps go on.

The model is cut into K fragments of transformer blocks (`fragments.cut`); embedding,
norm and head belong to fragments too. Fragment p starts its sync at step $p H / K - f$,
then every H steps. All quantities below are of one fragment, t is the step of its
start. Each region m sends

$$
\Delta^m = \theta^g - \theta^m_t
$$

and trains on for $\tau$ steps while the message crosses. Then the outer optimizer
steps on the mean, and every region mixes the result with its own fragment:

$$
\begin{align*}
\Delta &= \frac{1}{M} \sum_m \Delta^m \\
v &\leftarrow \mu v + \Delta \\
\theta^g &\leftarrow \theta^g - \eta \, (\Delta + \mu v) \\
\theta^m_{t+\tau} &\leftarrow \alpha \, \theta^m_{t+\tau} + (1 - \alpha) \, \theta^g
\end{align*}
$$

$\theta^g$ is the last outer value, equal in all regions, never the mixed one. alpha is
the weight on *local*: 1 never synchronizes, 0 discards the progress of the overlap. A
step merges arrived fragments before it starts others.

`merge_rule="replay"` uses LOSCAR's merge, $\theta^m_{t+\tau} \leftarrow \theta^g +
(\theta^m_{t+\tau} - \theta^m_t)$. `merge_feedback` (ours) adds the progress that the
mix drops, $(1 - \alpha)(\theta^m_{t+\tau} - \theta^m_t)$, to the region's next message.
f is `phase_steps`, 0 by default; with $f = \tau$ merges are at multiples of H / K.
`delay_steps="auto"` (ours) measures how long syncs take (`schedules.measured`).

Source: Streaming DiLoCo, Douillard et al., arXiv 2501.18512, algorithm 2 and section
2.3; updates and mixing read from the authors' code, FP4 and tau from published tables.
Derived here: K = 1, tau = 0, alpha = 0 is `diloco`.
Differs from the paper: the paper sends FP4 (E3M0), this float32 unless
`compress="fp4"`, so that methods are compared at one precision. The scale of FP4 is not
published; ours is the largest of each 256 values. FP4 is an eighth of the bytes.
Defaults: published eta 0.4, mu 0.9, alpha 0.5, H 30 or 100, tau 1 (up to 5
recommended); here H 100, K 4, tau 1 and the same eta, mu, alpha.
Measured here: docs/results/methods.md (tau 5).
"""

from typing import Literal

from cocodc_jax.sync import Method, Sync, merge, nesterov, schedules
from cocodc_jax.sync.cutting import Strategy
from cocodc_jax.transforms.numerics import check_choice, check_unused


def streaming_diloco(
    sync_interval: int = 100,
    num_fragments: int = 4,
    delay_steps: int | str = 1,
    mixing_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    fragment_strategy: Strategy = "strided",
    max_delay_steps: int | None = None,
    phase_steps: int = 0,
    merge_rule: Literal["mix", "replay"] = "mix",
    merge_feedback: bool = False,
) -> Method:
    """Build Streaming DiLoCo (arXiv 2501.18512): fragments, overlap, mixing.

    Args:
      sync_interval: H, inner steps, a multiple of `num_fragments`.
      num_fragments: K, fragments the model is cut into.
      delay_steps: tau, inner steps between a sync's start and its merge; "auto"
        measures how long syncs take, see `schedules.measured`.
      mixing_alpha: weight on the local fragment when a mean arrives, in [0, 1].
      outer_lr: learning rate of the outer Nesterov optimizer.
      outer_momentum: its momentum, in [0, 1).
      fragment_strategy: how units are dealt to fragments, "strided", "sequential" or
        "balanced", or tensors, "balanced_tensors", or a mixture of experts, "experts".
      max_delay_steps: the longest delay that "auto" may choose; None is H.
      phase_steps: steps by which starts come before the multiples of H / K; with tau,
        or its rest by H / K, merges fall on them.
      merge_rule: what a region does with what arrives, "mix" by `mixing_alpha`, or
        "replay" of its own progress since the start (LOSCAR's merge).
      merge_feedback: whether the progress that the mix drops is added to the region's
        next message; needs messages with error feedback (ours).
    """
    rules = {"mix": merge.mix(mixing_alpha), "replay": merge.replay()}
    check_choice("merge_rule", merge_rule, tuple(rules))
    rule = rules[merge_rule]
    if merge_feedback:
        kept = 1.0 if merge_rule == "replay" else mixing_alpha
        rule = merge.remembering(rule, kept)
    if merge_rule == "replay":
        check_unused("mixing_alpha", mixing_alpha, 0.5, "merge_rule='replay'")

    sync = Sync(
        schedule=schedules.staggered(
            sync_interval=sync_interval,
            num_fragments=num_fragments,
            delay_steps=delay_steps,
            phase_steps=phase_steps,
            max_delay_steps=max_delay_steps,
        ),
        outer=nesterov(outer_lr, outer_momentum),
        merge=rule,
        fragment_strategy=fragment_strategy,
    )
    return Method(name="streaming_diloco", sync=sync)
