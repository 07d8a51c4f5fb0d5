"""Which method, and its numbers: the union of what all methods take, one flag each."""

from __future__ import annotations

import dataclasses
from typing import Any

import cocodc_jax as cc
from cocodc_jax.sync.methods import Method, defaults


@dataclasses.dataclass(frozen=True)
class MethodConfig:
    """Which method, and its numbers; None is the method's own default.

    Attributes:
      method: a name of `cocodc_jax.methods.METHODS`, such as cocodc or diloco.
      sync_interval: H, inner steps within which every fragment is synchronised.
      num_fragments: K, fragments the model is cut into.
      fragment_strategy: strided, sequential or balanced.
      delay_steps: tau, inner steps from a sync's start to its application; auto
        follows what syncs take.
      max_delay_steps: the longest delay that auto may choose.
      syncs_per_interval: N, syncs in one interval of adaptive transmission; auto
        is as many as the network carries.
      network_share: gamma, share of the network that an automatic N may use.
      transmission_score: pseudo_gradient, aged or drift.
      outer_lr: learning rate of the outer optimizer.
      outer_momentum: momentum of the outer optimizer.
      mixing_alpha: weight on the local fragment when a mean arrives.
      curvature: Hessian-vector approximation of the delay compensation.
      curvature_units: units the curvature is taken in.
      compensation_strength: lambda, weight of the compensation's correction.
      compress: compressor of what a region sends, such as fp4, int8, topk:0.01,
        lowrank:32+int4, or ef+topk:0.01 with error feedback.
      outer_placement: host keeps the outer state on a host device, divided divides it
        over the devices of each region.
      region_weights: equal, or tokens to weigh regions by what they trained on.
      momentum_clip: phi, largest element of CO2's outer momentum.
      pair_pull: gamma, how strongly NoLoCo draws a pair together.
      pair_seed: seed of NoLoCo's pairs.
      arrivals_per_momentum: N, arrivals between two changes of a delayed momentum.
      momentum_spread: c, share of a delayed momentum that other arrivals apply.
      dynamic_steps: whether slower asynchronous regions do fewer steps.
      keep_cosine: cosine to the momentum from which on HeLoCo keeps a tensor.
      shrink_cosine: cosine to the momentum below which HeLoCo shrinks a tensor.
      answer_steps: steps each region's message takes, as 1,1,2,9.
      quorum: answers that a merge of Decoupled DiLoCo waits for.
      grace_steps: steps it waits for more answers after that.
      momentum_decay: beta of DeMo's momentum.
      lion_beta1: weight of the momentum in what Distributed Lion sends.
      lion_beta2: decay of Distributed Lion's momentum.
      lion_vote: majority or average of the regions' signs.
      rank: of DiLoCoX's factors in the first rounds.
      min_rank: the least that an adaptive rank becomes.
      adaptive_rank: whether rank and interval follow the effective rank of the means.
      num_rings: rings that Ravnest's clusters average over at once.
    """

    method: str = "cocodc"
    sync_interval: int | None = None
    num_fragments: int | None = None
    fragment_strategy: str | None = None
    delay_steps: int | str | None = None
    max_delay_steps: int | None = None
    syncs_per_interval: int | str | None = None
    network_share: float | None = None
    transmission_score: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    mixing_alpha: float | None = None
    curvature: str | None = None
    curvature_units: str | None = None
    compensation_strength: float | None = None
    compress: str | None = None
    outer_placement: str | None = None
    region_weights: str | None = None
    momentum_clip: float | None = None
    pair_pull: float | None = None
    pair_seed: int | None = None
    arrivals_per_momentum: int | None = None
    momentum_spread: float | None = None
    dynamic_steps: bool | None = None
    keep_cosine: float | None = None
    shrink_cosine: float | None = None
    answer_steps: str | None = None
    quorum: int | None = None
    grace_steps: int | None = None
    momentum_decay: float | None = None
    lion_beta1: float | None = None
    lion_beta2: float | None = None
    lion_vote: str | None = None
    rank: int | None = None
    min_rank: int | None = None
    adaptive_rank: bool | None = None
    num_rings: int | None = None

    def __post_init__(self):
        """Builds the method once, so that its own checks run.

        Raises:
          ValueError: for an unknown method or a number it refuses.
        """
        self.build()

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that this method takes, defaults filled in, others left out."""
        given = dataclasses.asdict(self)
        return {
            name: default if given.get(name) is None else given[name]
            for name, default in defaults(self.method).items()
        }

    def resolve(self) -> MethodConfig:
        """The same with the method's defaults written out: what a run is known by."""
        return dataclasses.replace(self, **self.arguments)

    def build(self) -> Method:
        """The method as a value."""
        return cc.methods.get(self.method, **self.arguments)
