"""What the programs of a run are made from, and how messages cross regions.

A `SyncSpec` specifies the syncs. An `Exchange` sends a fragment's message and never
waits: the mean that it returns arrives later; `transport.py` chooses one. The functions
encode each region's pseudo-gradient, Delta = theta^g - theta^m: old minus new, at least
float32, and measured from its anchor. That is the outer fragment, equal in all regions,
or the one that each region last received, if regions are asynchronous.

A robust mean filters messages by their lengths (`sync.robust`), measured as fragments
are sent. In the program, lengths are all-reduced before the messages, one number each.
On the outer mesh they travel with encoded messages; uncompressed messages wait for
them, one more network delay.

Inside a program the collectives have two halves (`Crossing`): `leave` encodes a
fragment and starts its collective; `arrive` computes the mean pseudo-gradient from the
result. Between them is nothing, or, where regions share a fabric, a scan of inner steps
that hides the collective (`segment.py`).
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core import reduce
from cocodc_jax.core.reduce import ring_sum
from cocodc_jax.core.sync import Measured, encode, outer_parts
from cocodc_jax.engine import flat_buffer
from cocodc_jax.engine.devices import Devices
from cocodc_jax.engine.mesh import INSIDE, REGION, regional
from cocodc_jax.engine.placement import OuterPlacement, Shardings
from cocodc_jax.engine.region_map import (
    LocalRegions,
    everywhere,
    psum_over_regions,
    region_shard_map,
    sum_of_block,
)
from cocodc_jax.sync.averages import sync_key
from cocodc_jax.sync.fragments import Fragment, Fragments, PyTree
from cocodc_jax.sync.inner_state import OnMerge
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import STAGED, UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.robust import LENGTH_BYTES, VERDICT, without
from cocodc_jax.sync.schedules.base import Event
from cocodc_jax.sync.summed import ByRings, SummedFactors


@dataclasses.dataclass(frozen=True)
class SyncSpec:
    """A method's syncs, with the model, regions and shardings that they apply to."""

    sync: Sync  # Bound to the regions.
    regions: Regions  # All of them.
    fragments: Fragments  # The cut of the parameters.
    place: OuterPlacement  # Where the outer state is, and the shardings of all arrays.
    params: PyTree  # Shapes of one region's parameters.
    # `(params, batch, key) -> (loss, aux)` of one region; with a `model_state` see
    # there.
    loss_fn: AnyLossFn
    user_inputs: UserInputs  # What only the user knows.
    local: LocalRegions  # How a device computes its regions.
    devices: Devices  # What compiles and runs programs.
    model_state: ModelState | None = None  # Of the model, None if it has none.
    # What a merge does to one region's inner optimizer state, None if nothing.
    on_merge: OnMerge | None = None

    @property
    def shardings(self) -> Shardings:
        """Shardings of all arrays but the outer state's."""
        return self.place.shardings

    @property
    def mesh(self) -> Mesh:
        """The inner mesh."""
        return self.shardings.mesh

    @property
    def is_measured(self) -> bool:
        """Whether measured times are sent with messages."""
        return self.sync.schedule.is_measured

    def staged(self, fragment_id: int) -> Any:
        """Return shardings of the copy that a merge needs, None if it needs none."""
        needed = STAGED in self.sync.copies
        return self.shardings.staged[fragment_id] if needed else None

    def start_step(self, step: int) -> np.int32 | None:
        """Return the step that a sync's key derives from; None if no average draws."""
        return np.int32(step) if self.sync.message.average.draws else None

    @functools.cached_property
    def outer_shapes(self) -> tuple[Fragment, ...]:
        """Shapes of the outer fragments."""
        return jax.eval_shape(lambda x: outer_parts(self.fragments, x), self.params)


Weights = tuple[float, ...]  # Of the regions in a mean, of sum 1.
# Measured seconds of an inner step and of a sync, 0 if not yet known.
Times = tuple[float, float]
# The staged copy if a merge needs it, the mean in flight, what arrives with it by name,
# and the compressors' state after it.
Sent = tuple[PyTree, Any, dict[str, jax.Array], PyTree]


class Exchange(abc.ABC):
    """A way for messages to cross regions."""

    shares_mesh: bool = False  # A message crosses in a program of the inner mesh.
    goes_on: bool = False  # Inner steps go on while a mean is late.

    def __init__(self, spec: SyncSpec):
        self._spec = spec
        self._programs: dict[tuple[int, int], Callable] = {}  # By fragment and rank.

    @property
    def num_regions(self) -> int:
        """Maximum number of regions that send messages."""
        return self._spec.regions.num

    @abc.abstractmethod
    def send(self, event: Event, weights: Weights, times: Times, *arrays: Any) -> Sent:
        """Send a fragment; a region of weight 0 does not send.

        `times` are sent too if the schedule is measured. `arrays` are a `RegionState`,
        which is only read; the outer fragment on the mesh, or what each region last
        received; and the compressors' state of the message's rank.
        """

    @abc.abstractmethod
    def _make(self, fragment_id: int, rank: int, compressor_state: PyTree) -> Callable:
        """Make the program of the mesh that encodes a fragment, see `make_messages`."""

    def _run(self, event: Event, weights: Weights, arrays: tuple, *rest: Any) -> Any:
        """Run the program of `_make`; `arrays` are those of `send`."""
        region, stale_params, compressor_state = arrays
        k, rank, spec = event.fragment_id, event.rank, self._spec
        if (k, rank) not in self._programs:
            self._programs[k, rank] = self._make(k, rank, compressor_state)
        return self._programs[k, rank](
            region.params,
            stale_params,
            compressor_state,
            spec.devices.weights(weights, regional(spec.mesh)),
            region.key,
            spec.start_step(event.start_step),
            *rest,
        )

    def num_bytes(self, fragment_id: int, rank: int = 0) -> int:
        """Return the bytes of one region's message; 0 for a single region."""
        spec, num_regions = self._spec, self.num_regions
        if num_regions == 1:
            return 0
        message, part = spec.sync.message, spec.outer_shapes[fragment_id]
        size = message.num_bytes(part, num_regions, rank)
        size += LENGTH_BYTES if spec.sync.robust else 0
        # A pseudo-gradient has columns for the times of all regions.
        times = 1 if message.compressor(rank) is not None else num_regions
        return size + (8 * times if spec.is_measured else 0)

    def arrives_with(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes of what arrives with a mean, by name, as `send` returns it."""
        spec, found = self._spec, {}
        if spec.sync.robust is not None:
            found[VERDICT] = jax.ShapeDtypeStruct((spec.regions.num,), jnp.int32)
        if spec.is_measured:
            found["times"] = jax.ShapeDtypeStruct((spec.regions.num, 2), jnp.float32)
        return found

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Select this program's regions from a verdict on all regions."""
        return verdict


def make_messages(spec: SyncSpec, fragment_id: int, rank: int) -> Callable:
    """Make the encoding of a fragment on a shard, for `region_shard_map`.

    `outgoing(params, stale_params, state, weights, keys, start_step) -> (staged,
    message, state)`: the current fragment if a merge needs it, else None; the value to
    average (see `sync.averages`), encoded if the method compresses, and `Measured` for
    a robust mean; and the compressors' state, which a region of weight 0 keeps.
    """
    sync, is_by_region = spec.sync, spec.sync.schedule.is_by_region
    keeps = STAGED in sync.copies

    def outgoing(params, stale_params, state, weights, keys, start_step):
        staged = spec.fragments.take(params, fragment_id, lead=1)
        key = None if start_step is None else sync_key(fragment_id, start_step)

        def one_region(anchor, whole, part, memory, weight, key_data):
            return encode(
                sync, whole, part, anchor, memory, key_data, weight, key, rank
            )

        axes = (0 if is_by_region else None, 0, 0, 0, 0, 0)
        message, new = spec.local.map(one_region, axes)(
            stale_params, params, staged, state, weights, keys
        )
        if sync.message.compressor(rank) is not None:
            state = new
        return staged if keeps else None, message, state

    return outgoing


def over_regions(spec: SyncSpec, leave: Callable, crossed: Any) -> Callable:
    """Map a function like `make_messages`'s over the shards of regions.

    `crossed` are the specs of its second result.
    """
    stale = P(REGION) if spec.sync.schedule.is_by_region else P()
    in_specs = (P(REGION), stale, *(P(REGION),) * 3, P())
    out_specs = (P(REGION), crossed, P(REGION))
    return region_shard_map(leave, spec.mesh, in_specs=in_specs, out_specs=out_specs)


def make_restore(spec: SyncSpec, fragment_id: int) -> Callable:
    """Make `restore(mean, start_step) -> mean pseudo-gradient`, see `sync.averages`."""
    like = spec.outer_shapes[fragment_id]

    def restore(mean, start_step):
        key = None if start_step is None else sync_key(fragment_id, start_step)
        return spec.sync.message.average.after(mean, like, key)

    return restore


def with_length(spec: SyncSpec, shapes: PyTree, rank: int) -> PyTree:
    """Return the shapes of a message as sent: `Measured` if it is filtered."""
    if spec.sync.robust is None:
        return shapes
    is_summed = spec.sync.message.compressor(rank) is None
    dtype = jax.tree.leaves(shapes)[0].dtype if is_summed else jnp.float32
    return Measured(shapes, jax.ShapeDtypeStruct((), dtype))


def filter_block(
    spec: SyncSpec, sent: PyTree, weights: jax.Array
) -> tuple[PyTree, jax.Array, dict[str, jax.Array]]:
    """Filter a shard's messages by those of all regions, inside `region_shard_map`.

    `sent` is `Measured`, or the messages if there is no filter. Returns messages and
    weights to sum, and the verdicts of all regions, `{}` without a filter.
    """
    robust = spec.sync.robust
    if robust is None:
        return spec.sync.counted(sent, weights), weights, {}
    size = len(weights)
    first = jax.lax.axis_index(REGION) * size

    def of_all(x):
        nowhere = jnp.zeros(spec.regions.num, x.dtype)
        own = jax.lax.dynamic_update_slice_in_dim(nowhere, x, first, 0)
        return psum_over_regions(own)

    verdict, counted = robust.judge(of_all(sent.length), of_all(weights))
    weights = jax.lax.dynamic_slice_in_dim(counted, first, size)
    return without(sent.message, weights), weights, {VERDICT: verdict}


def robust_mean(
    spec: SyncSpec, rank: int, sent: PyTree, weights: jax.Array
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Return the mean of all regions' messages, and verdicts; see `filter_block`."""
    message, robust = spec.sync.message, spec.sync.robust
    sent = spec.sync.counted(sent, weights)
    if robust is None:
        return message.combine(sent, weights, rank), {}
    verdict, weights = robust.judge(sent.length, weights)
    found = without(sent.message, weights)
    return robust.combine(message, found, weights, rank), {VERDICT: verdict}


class Crossing(NamedTuple):
    """How a fragment crosses regions."""

    # `leave(params, stale_params, state, weights, keys, start_step) -> (staged,
    # crossed, state)`, with arguments and other results as for
    # `make_messages`; `crossed` is on every device that needs it.
    leave: Callable
    # `arrive(crossed, start_step) -> (mean, verdicts)`: the mean pseudo-gradient, and
    # the verdicts by name.
    arrive: Callable


def make_crossing(
    spec: SyncSpec, fragment_id: int, rank: int, in_one_buffer: bool = False
) -> Crossing:
    """Make the `Crossing` of a fragment's message.

    With `in_one_buffer` all arrays of a compressed message are one transfer, which
    inner steps can hide.
    """
    message = spec.sync.message
    if message.compressor(rank) is not None:
        return make_decoded(spec, fragment_id, rank, in_one_buffer)
    outgoing = make_messages(spec, fragment_id, rank)
    restore = make_restore(spec, fragment_id)
    is_by_rings = isinstance(message, ByRings)
    by_rings = make_ring_sum(spec.mesh, message) if is_by_rings else None

    def of_shard(params, stale_params, state, weights, *rest):
        staged, sent, state = outgoing(params, stale_params, state, weights, *rest)
        delta, weights, told = filter_block(spec, sent, weights)

        def summed(each):
            return psum_over_regions(sum_of_block(each, weights))

        if isinstance(message, SummedFactors):
            mean, state = reduce.factored(
                delta, state, weights, summed, spec.local.map, lambda x: x[0]
            )
        elif by_rings is None:
            mean = summed(delta)
        else:
            mean = jax.tree.map(lambda x: x[None], sum_of_block(delta, weights))
        return staged, (mean, told), state

    mapped = over_regions(spec, of_shard, (P(REGION) if by_rings else P(), P()))

    def leave(*arguments):
        staged, (mean, told), state = mapped(*arguments)
        return staged, (by_rings(mean) if by_rings else mean, told), state

    def arrive(crossed, start_step):
        mean, told = crossed
        return restore(mean, start_step), told

    return Crossing(leave, arrive)


def make_decoded(
    spec: SyncSpec, fragment_id: int, rank: int, in_one_buffer: bool
) -> Crossing:
    """Make the `Crossing` of messages that are all-gathered and decoded everywhere."""
    encoded = over_regions(spec, make_messages(spec, fragment_id, rank), P(REGION))
    restore = make_restore(spec, fragment_id)

    def leave(params, stale_params, state, weights, *rest):
        staged, message, state = encoded(params, stale_params, state, weights, *rest)
        # The weights too: otherwise decoding each message waits for its weight.
        return staged, cross((message, weights)), state

    def arrive(crossed, start_step):
        message, weights = join(crossed)
        mean, told = robust_mean(spec, rank, message, weights)
        return restore(mean, start_step), told

    if not in_one_buffer:
        cross, join = functools.partial(everywhere, spec.mesh), lambda crossed: crossed
        return Crossing(leave, arrive)
    shapes = spec.sync.message.encoded(spec.outer_shapes[fragment_id], rank)
    shapes = with_length(spec, shapes, rank)
    weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
    cross = functools.partial(shares_everywhere, spec.mesh)
    join = functools.partial(joined, spec.mesh, shapes=(shapes, weight))
    return Crossing(leave, arrive)


def shares_everywhere(mesh: Mesh, messages: PyTree) -> jax.Array:
    """All-gather messages of all regions as one flat buffer, a share to each device.

    Returns `[D, R / D, n]`, D the size of the region axis: columns sharded over the
    devices of each region, so that no byte crosses twice between two regions. It keeps
    the layout of the all-gather: any change of it must come after the steps that hide
    the collective.
    """
    buffer = flat_buffer.pack(messages)
    num_shares = math.prod(mesh.shape[axis] for axis in INSIDE)
    buffer = jnp.pad(buffer, ((0, 0), (0, -buffer.shape[1] % num_shares)))
    # Otherwise XLA would shard, gather and shard parts of it again.
    buffer = jax.lax.with_sharding_constraint(buffer, regional(mesh))
    # The type system cannot see that all shards are equal.
    return jax.shard_map(
        lambda rows: jax.lax.all_gather(rows, REGION),
        mesh=mesh,
        in_specs=P(REGION, INSIDE),
        out_specs=P(None, None, INSIDE),
        check_vma=False,
    )(buffer)


def joined(mesh: Mesh, buffer: jax.Array, shapes: PyTree) -> PyTree:
    """Gather the shares of a buffer inside each region; unpack it, `[R, ...]`."""
    buffer = everywhere(mesh, buffer)
    return flat_buffer.unpack(buffer.reshape(-1, buffer.shape[-1]), shapes)


def make_ring_sum(mesh: Mesh, rings: ByRings) -> Callable[[PyTree], PyTree]:
    """Make the sum over the shards: leaves `[D, ...]`, an entry each, to `[...]`."""

    def of_shard(tree):
        return ring_sum(jax.tree.map(lambda x: x[0], tree), rings, REGION)

    # All shards hold equal sums, but a permutation's result is typed as varying and
    # cannot be cast back. So this program, which does nothing else, is unchecked; a
    # test compares the shards bit for bit.
    return jax.shard_map(
        of_shard,
        mesh=mesh,
        axis_names={REGION},
        in_specs=P(REGION),
        out_specs=P(),
        check_vma=False,
    )


class InProgram(Exchange):
    """Compiled programs that send fragments and average them; see `make_crossing`."""

    shares_mesh = True

    def __init__(self, spec: SyncSpec, in_one_buffer: bool):
        super().__init__(spec)
        self._in_one_buffer = in_one_buffer

    def send(self, event: Event, weights: Weights, times: Times, *arrays: Any) -> Sent:
        """Send a fragment; see `Exchange.send`."""
        del times  # Only the outer mesh sends times.
        staged, mean, state, told = self._run(event, weights, arrays)
        return staged, mean, told, state

    def _make(self, fragment_id: int, rank: int, compressor_state: PyTree) -> Callable:
        spec, shardings = self._spec, self._spec.shardings
        crossing = make_crossing(spec, fragment_id, rank, self._in_one_buffer)

        def sent(*arguments):
            staged, crossed, state = crossing.leave(*arguments)
            mean, told = crossing.arrive(crossed, arguments[-1])
            return staged, mean, state, told

        return spec.devices.jit(
            sent,
            f"send fragment {fragment_id}",
            self.num_bytes(fragment_id, rank),
            out_shardings=(
                spec.staged(fragment_id),
                shardings.fragments[fragment_id],
                shardings.of_regions(fragment_id, compressor_state),
                NamedSharding(spec.mesh, P()),
            ),
        )
