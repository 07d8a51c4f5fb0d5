"""The route through one compiled program: it sends, and takes the mean.

Pseudo-gradients as they are become an all-reduce, or rings (`rings.py`), or two
all-reduces of their factors. A compressed message stays compressed on its way: what the
compiler gathers from all regions is the encoded arrays, and each device decodes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.runtime.devices import transfer
from cocodc_jax.runtime.devices.mesh import REGION, regional
from cocodc_jax.runtime.devices.region_map import psum_over_regions, region_shard_map
from cocodc_jax.runtime.devices.shardings import with_shardings
from cocodc_jax.runtime.exchange.judged import (
    abstract_verdict,
    judge_block,
    judged_mean,
)
from cocodc_jax.runtime.exchange.outgoing import (
    Departure,
    abstract_sent,
    in_specs,
    make_outgoing,
    make_restore,
    start_step_of,
    sum_of_block,
)
from cocodc_jax.runtime.exchange.rings import make_ring_sum
from cocodc_jax.runtime.setting import Setting
from cocodc_jax.runtime.state import RegionState
from cocodc_jax.sync.factors import SummedFactors
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.needs import STAGED
from cocodc_jax.sync.rings import ByRings
from cocodc_jax.transforms import power_sgd
from cocodc_jax.transforms.numerics import vary_like

PyTree = Any


class InProgram:
    """The compiled programs that send fragments and average them."""

    shares_mesh = True

    @property
    def num_regions(self) -> int:
        """Regions whose messages there are."""
        return self._setting.regions.num

    def __init__(self, setting: Setting):
        """Compile nothing yet."""
        self._setting = setting
        self._programs: dict[tuple[int, int], Callable] = {}

    def send(
        self,
        departure: Departure,
        region: RegionState,
        stale_params: Fragment,
        compressor_state: PyTree,
    ) -> tuple[Fragment | None, Fragment, dict[str, jax.Array], PyTree]:
        """Send a fragment.

        Args:
          departure: what starts.
          region: read only.
          stale_params: the outer fragment on the mesh, or what each region last took.
          compressor_state: of the regions, of the message's rank.

        Returns:
          The staged copy, if anyone needs it; the mean, on its way; what is told along
          with it, see `abstract_told`; the compressors' state after it.
        """
        k, rank = departure.event.fragment_id, departure.event.rank
        if (k, rank) not in self._programs:
            self._programs[k, rank] = self._make(k, rank, compressor_state)
        staged, mean, state, told = self._programs[k, rank](
            region.params,
            stale_params,
            compressor_state,
            self._weights(departure.weights),
            region.key,
            start_step_of(self._setting, departure.event),
        )
        return staged, mean, told, state

    def listed(
        self,
        fragment_id: int,
        region: RegionState,
        stale_params: Fragment,
        compressor_state: PyTree,
    ) -> tuple[Callable, tuple]:
        """Return the program that sends a fragment, and its abstract arguments.

        Args:
          fragment_id: which.
          region: abstract, as the others are.
          stale_params: as of `send`.
          compressor_state: of the regions, of a message without a rank.
        """
        program = self._make(fragment_id, 0, compressor_state)
        return program, abstract_sent(
            self._setting, region, stale_params, compressor_state
        )

    def _make(self, fragment_id: int, rank: int, compressor_state: PyTree) -> Callable:
        shardings = self._setting.shardings
        keeps = STAGED in self._setting.sync.copies
        out_shardings = (
            shardings.staged[fragment_id] if keeps else None,
            shardings.fragments[fragment_id],
            shardings.of_regions(fragment_id, compressor_state),
            {name: x.sharding for name, x in self.abstract_told(fragment_id).items()},
        )
        send = _choose(self._setting, rank)(self._setting, fragment_id, rank)
        restore = make_restore(self._setting, fragment_id)

        def sent(*arguments):
            staged, mean, state, told = send(*arguments)
            return staged, restore(mean, arguments[-1]), state, told

        return jax.jit(sent, out_shardings=out_shardings)

    @functools.lru_cache(maxsize=64)  # noqa: B019  (lives as long as the programs)
    def _weights(self, weights: tuple[float, ...]) -> jax.Array:
        return transfer.put(np.array(weights, float), regional(self._setting.mesh))

    def abstract_mean(self, fragment_id: int, part: Fragment) -> Fragment:
        """Return shapes and shardings of a mean on its way; `part` the outer one's."""
        return with_shardings(part, self._setting.shardings.fragments[fragment_id])

    def abstract_told(self, fragment_id: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and shardings of what is told along with a mean, by name.

        The verdicts of all regions, if any may be left out. What is measured crosses on
        the outer mesh only.
        """
        del fragment_id
        return abstract_verdict(self._setting, NamedSharding(self._setting.mesh, P()))


def _choose(setting: Setting, rank: int) -> Callable:
    if isinstance(setting.sync.message, ByRings):
        return make_ringed
    if isinstance(setting.sync.message, SummedFactors):
        return make_factored
    return (
        make_summed if setting.sync.message.compressor(rank) is None else make_decoded
    )


def make_summed(setting: Setting, fragment_id: int, rank: int) -> Callable:
    """Make `send(params, stale_params, state, weights, keys, start_step)`.

    Returns:
      A program that gives `(staged, mean, state, told)`, by an all-reduce.
    """
    outgoing = make_outgoing(setting, fragment_id, rank)

    def summed(params, stale_params, state, weights, keys, start_step):
        staged, sent, state = outgoing(
            params, stale_params, state, weights, keys, start_step
        )
        delta, weights, told = judge_block(setting, sent, weights)
        mean = psum_over_regions(sum_of_block(delta, weights))
        return staged, mean, state, told

    return region_shard_map(
        summed,
        setting.mesh,
        in_specs=in_specs(setting),
        out_specs=(P(REGION), P(), P(REGION), P()),
    )


def make_decoded(setting: Setting, fragment_id: int, rank: int) -> Callable:
    """Make the same for messages that are gathered as they are and decoded by all."""
    encoded = region_shard_map(
        make_outgoing(setting, fragment_id, rank),
        setting.mesh,
        in_specs=in_specs(setting),
        out_specs=P(REGION),
    )

    def decoded(params, stale_params, state, weights, keys, start_step):
        staged, message, state = encoded(
            params, stale_params, state, weights, keys, start_step
        )
        # The weights too: else every message decoded would wait for its own.
        message, weights = everywhere(setting.mesh, (message, weights))
        mean, told = judged_mean(setting, rank, message, weights)
        return staged, mean, state, told

    return decoded


def make_ringed(setting: Setting, fragment_id: int, rank: int) -> Callable:
    """Make the same by several rings at once."""
    outgoing = make_outgoing(setting, fragment_id, rank)
    assert isinstance(setting.sync.message, ByRings)
    ring_sum = make_ring_sum(setting.mesh, setting.sync.message)

    def partial(params, stale_params, state, weights, keys, start_step):
        staged, sent, state = outgoing(
            params, stale_params, state, weights, keys, start_step
        )
        delta, weights, told = judge_block(setting, sent, weights)
        own = jax.tree.map(lambda x: x[None], sum_of_block(delta, weights))
        return staged, own, state, told

    mapped = region_shard_map(
        partial,
        setting.mesh,
        in_specs=in_specs(setting),
        out_specs=(P(REGION), P(REGION), P(REGION), P()),
    )

    def ringed(*arguments):
        staged, own, state, told = mapped(*arguments)
        return staged, ring_sum(own), state, told

    return ringed


def make_factored(setting: Setting, fragment_id: int, rank: int) -> Callable:
    """Make the same by sums of low-rank factors, see `transforms.power_sgd`.

    A region of weight 0 keeps its residual; the right factors are everybody's.
    """
    outgoing = make_outgoing(setting, fragment_id, rank)
    of_regions = setting.local.map

    def factored(params, stale_params, state, weights, keys, start_step):
        staged, sent, old = outgoing(
            params, stale_params, state, weights, keys, start_step
        )
        delta, weights, told = judge_block(setting, sent, weights)

        def summed(each):
            return psum_over_regions(sum_of_block(each, weights))

        # Q is the same in all regions.
        right = jax.tree.map(lambda q: q[0], old.right)
        meant = of_regions(power_sgd.meant)(delta, old)
        firsts = of_regions(power_sgd.first)(meant, old.right)
        left = power_sgd.orthonormal(summed(firsts), right)
        seconds = of_regions(lambda tree: power_sgd.second(tree, left, right))(meant)
        sums = summed(seconds)
        like = jax.tree.map(lambda x: x[0], delta)
        mean = power_sgd.decoded(left, sums, like)
        shared = power_sgd.refreshed(sums, right)

        def remembered(meant, old, weight):
            residual = jax.tree.map(
                lambda a, sent, e: jnp.where(weight > 0, a - sent.astype(a.dtype), e),
                meant,
                mean,
                old.residual,
            )
            return vary_like(power_sgd.PowerSgdState(residual, shared), old)

        return staged, mean, of_regions(remembered)(meant, old, weights), told

    return region_shard_map(
        factored,
        setting.mesh,
        in_specs=in_specs(setting),
        out_specs=(P(REGION), P(), P(REGION), P()),
    )


def everywhere(mesh: Mesh, messages: PyTree) -> PyTree:
    """Gather messages `[R, ...]` of all regions to every device, as they are."""
    return jax.lax.with_sharding_constraint(messages, NamedSharding(mesh, P()))
