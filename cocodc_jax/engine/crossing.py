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

`MeshCrossing` is how one crosses in a program of the mesh, and `InProgram` the exchange
of programs that do nothing else.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core import sync as core
from cocodc_jax.core.state import RegionState
from cocodc_jax.core.sync import Extras, Left, Measured, outer_parts
from cocodc_jax.engine import flat_buffer
from cocodc_jax.engine.devices import Devices
from cocodc_jax.engine.mesh import INSIDE, REGION, regional
from cocodc_jax.engine.placement import OuterPlacement, Shardings
from cocodc_jax.engine.region_map import LocalRegions, everywhere, region_shard_map
from cocodc_jax.sync import needs
from cocodc_jax.sync.averages import sync_key
from cocodc_jax.sync.axis import BY_RINGS, GATHERED, SUMMED
from cocodc_jax.sync.fragments import Fragment, Fragments, PyTree
from cocodc_jax.sync.inner_state import OnMerge
from cocodc_jax.sync.method import Sync
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import STAGED, UserInputs
from cocodc_jax.sync.regions import Regions
from cocodc_jax.sync.robust import LENGTH_BYTES, VERDICT
from cocodc_jax.sync.schedules.base import Event


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What merges need of the caller, which takes the inner steps.

    Attributes:
      loss_fn: `(params, batch, key) -> (loss, aux)` of one region; with a `model_state`
        see there.
      user_inputs: inputs that only the user can provide.
      optimizer: the inner optimizer, for its first state.
      model_state: of the model, None if it has none.
      on_merge: what a merge does to one region's inner optimizer state, None if
        nothing.
    """

    loss_fn: AnyLossFn
    user_inputs: UserInputs
    optimizer: optax.GradientTransformation
    model_state: ModelState | None = None
    on_merge: OnMerge | None = None


@dataclasses.dataclass(frozen=True)
class SyncSpec:
    """A method's syncs, with the model, regions and shardings that they apply to."""

    sync: Sync  # Bound to the regions.
    regions: Regions  # All of them.
    fragments: Fragments  # The cut of the parameters.
    place: OuterPlacement  # Where the outer state is, and the shardings of all arrays.
    params: PyTree  # Shapes of one region's parameters.
    trainer: Trainer
    local: LocalRegions  # The regions of a device.
    devices: Devices  # What compiles and runs programs.

    def at(self, rank: int) -> SyncSpec:
        """Return the spec of a sync whose message has a rank; 0 is the method's own."""
        message = self.sync.message.at(rank)
        if message is self.sync.message:
            return self
        sync = dataclasses.replace(self.sync, message=message)
        return dataclasses.replace(self, sync=sync)

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

    @functools.cached_property
    def copies(self) -> frozenset[str]:
        """Names of the copies kept of a fragment in flight, see `sync.needs`."""
        return self.sync.copies

    @functools.cached_property
    def wants_batch(self) -> bool:
        """Whether a merge uses the last batch."""
        return needs.wants_batch(self.sync.merge.needs)

    @functools.cached_property
    def wants_key(self) -> bool:
        """Whether a merge uses a PRNG key of the region."""
        return needs.wants_key(self.sync.merge.needs)

    @functools.cached_property
    def reads_opt_state(self) -> bool:
        """Whether a merge reads the inner optimizer's state."""
        is_moved = self.trainer.on_merge is not None
        return is_moved or needs.wants_state(self.sync.merge.needs)

    @property
    def is_gathered(self) -> bool:
        """Whether messages are gathered in all regions and decoded there."""
        return self.sync.message.way == GATHERED

    def kept_shardings(self, fragment_id: int) -> dict[str, Any]:
        """Return shardings of the copies that a start keeps, by name."""
        return self.copies_of(self.shardings.staged[fragment_id])

    def copies_of(self, part: PyTree) -> dict[str, PyTree]:
        """Return the copies of a fragment that a start keeps, by name."""
        return {STAGED: part} if STAGED in self.copies else {}

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
# The mean in flight, what is kept until it arrives by name, and the compressors' state.
Sent = tuple[Any, Extras, PyTree]


class Sending(NamedTuple):
    """A fragment that starts."""

    event: Event
    weights: Weights  # A region of weight 0 does not send.
    times: Times  # Sent too if the schedule is measured.
    region: RegionState  # Only read.
    # The outer fragment on the mesh, or what each region last received.
    anchor: Fragment
    memory: PyTree  # The compressors' state of the message's rank.


class Leaving(NamedTuple):
    """Arguments of a program that sends a fragment."""

    params: PyTree
    anchor: Fragment
    memory: PyTree
    weights: jax.Array  # `[R]`.
    keys: jax.Array  # PRNG key data, `[R, 2]`.
    start_step: Any  # See `SyncSpec.start_step`.


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
    def send(self, sending: Sending) -> Sent:
        """Send a fragment; see `core.sync.start`."""

    @abc.abstractmethod
    def _make(self, spec: SyncSpec, fragment_id: int, memory: PyTree) -> Callable:
        """Make the program of the mesh that sends a fragment, of `Leaving`.

        `memory` is the compressors' state, `spec` of the message's rank.
        """

    def _run(self, sending: Sending, *rest: Any) -> Any:
        """Run the program of `_make`."""
        spec = self._spec
        event = sending.event
        key = (event.fragment_id, event.rank)
        if key not in self._programs:
            self._programs[key] = self._make(
                spec.at(event.rank), event.fragment_id, sending.memory
            )

        leaving = Leaving(
            params=sending.region.params,
            anchor=sending.anchor,
            memory=sending.memory,
            weights=spec.devices.weights(sending.weights, regional(spec.mesh)),
            keys=sending.region.key,
            start_step=spec.start_step(event.start_step),
        )
        return self._programs[key](leaving, *rest)

    def num_bytes(self, fragment_id: int, rank: int = 0) -> int:
        """Return the bytes of one region's message; 0 for a single region."""
        return self._bytes(self._spec.at(rank), fragment_id)

    def _bytes(self, spec: SyncSpec, fragment_id: int) -> int:
        num_regions = self.num_regions
        if num_regions == 1:
            return 0

        part = spec.outer_shapes[fragment_id]
        size = spec.sync.message.num_bytes(part, num_regions)
        if spec.sync.robust:
            size += LENGTH_BYTES
        if spec.is_measured:
            # A pseudo-gradient has columns for the times of all regions.
            num_times = 1 if spec.is_gathered else num_regions
            size += 8 * num_times
        return size

    def arrives_with(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes of what arrives with a mean, by name, as `send` returns it."""
        spec = self._spec
        extras = {}
        if spec.sync.robust is not None:
            extras[VERDICT] = jax.ShapeDtypeStruct((spec.regions.num,), jnp.int32)
        if spec.is_measured:
            extras["times"] = jax.ShapeDtypeStruct((spec.regions.num, 2), jnp.float32)
        return extras

    def own_verdict(self, verdict: np.ndarray) -> np.ndarray:
        """Select this program's regions from a verdict on all regions."""
        return verdict


def key_of(fragment_id: int, start_step: Any) -> jax.Array | None:
    """Return the key of a sync, see `sync.averages`; None if no average draws."""
    return None if start_step is None else sync_key(fragment_id, start_step)


def over_regions(
    spec: SyncSpec, fragment_id: int, crossed: Any, *, leaves: bool
) -> Callable:
    """Map `core.sync.encode_all` over the shards of regions, and `leave` if `leaves`.

    Returns `leave(leaving) -> (copies, left, memory)`: the copies that a merge needs,
    by name, what crosses, of specs `crossed`, and the compressors' state.
    """
    has_own_anchors = spec.sync.schedule.is_by_region

    def of_shard(
        params: PyTree,
        anchor: Fragment,
        memory: PyTree,
        weights: jax.Array,
        keys: jax.Array,
        start_step: Any,
    ) -> tuple[Extras, Any, PyTree]:
        part = spec.fragments.take(params, fragment_id, lead=1)
        sent, new_memory = core.encode_all(
            sync=spec.sync,
            axis=spec.local,
            part=part,
            anchor=anchor,
            memory=memory,
            key_data=keys,
            weights=weights,
            params=params,
            has_own_anchors=has_own_anchors,
            sync_key=key_of(fragment_id, start_step),
        )

        if leaves:
            sent, new_memory = core.leave(
                spec.sync, spec.local, sent=sent, memory=new_memory, weights=weights
            )
        return spec.copies_of(part), sent, new_memory

    regions = P(REGION)
    of_anchor = regions if has_own_anchors else P()
    mapped = region_shard_map(
        of_shard,
        spec.mesh,
        in_specs=(regions, of_anchor, regions, regions, regions, P()),
        out_specs=(regions, crossed, regions),
    )
    return lambda leaving: mapped(*leaving)


def with_length(spec: SyncSpec, shapes: PyTree) -> PyTree:
    """Return the shapes of a message as sent: `Measured` if it is filtered."""
    if spec.sync.robust is None:
        return shapes
    dtype = jnp.float32 if spec.is_gathered else jax.tree.leaves(shapes)[0].dtype
    return Measured(shapes, jax.ShapeDtypeStruct((), dtype))


@dataclasses.dataclass(frozen=True)
class MeshCrossing:
    """How a fragment crosses in a program of the mesh, a `core.sync.Crossing`.

    The collectives have two halves: `leave` and `cross` begin them, `arrive` computes
    the mean. If regions share a fabric, a scan of inner steps may be between them,
    which hides the collectives (`segment.py`). A compressed message stays compressed:
    the encoded arrays are all-gathered, and each device decodes them.

    Attributes:
      spec: of the message's rank.
      fragment_id: which fragment.
      leaving: the program's arguments.
      in_one_buffer: whether all arrays of a gathered message are one transfer, which
        inner steps can hide.
    """

    spec: SyncSpec
    fragment_id: int
    leaving: Leaving
    in_one_buffer: bool = False

    def leave(self) -> tuple[tuple[Any, Left], PyTree]:
        """Encode; see `core.sync.leave`. The copies of the fragment go along."""
        way = self.spec.sync.message.way
        of_sent = P() if way == SUMMED else P(REGION)
        specs: Any = Left(of_sent, P(REGION), cast(Any, P()))
        leave = over_regions(self.spec, self.fragment_id, specs, leaves=True)

        copies, left, memory = leave(self.leaving)
        return (copies, left), memory

    def cross(self, left: tuple[Any, Left]) -> tuple[Any, Any]:
        """Send by the message's way, to every device that needs it."""
        copies, leaving = left
        mesh = self.spec.mesh
        message = self.spec.sync.message
        if message.way == BY_RINGS:
            total = make_ring_sum(mesh, message)(leaving.sent)
            return copies, leaving._replace(sent=total)

        if message.way == GATHERED and self.in_one_buffer:
            return copies, shares_everywhere(mesh, (leaving.sent, leaving.weights))

        if message.way == GATHERED:
            # The weights too: otherwise the decoding of each message waits for its
            # weight.
            return copies, everywhere(mesh, leaving)

        return copies, leaving

    def arrive(self, crossed: tuple[Any, Any]) -> tuple[Fragment, Extras]:
        """Return the mean pseudo-gradient, and what is kept with it."""
        spec = self.spec
        copies, left = crossed
        like = spec.outer_shapes[self.fragment_id]
        if spec.is_gathered and self.in_one_buffer:
            message = with_length(spec, spec.sync.message.encoded(like))
            weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
            sent, weights = joined(spec.mesh, left, (message, weight))
            left = Left(sent, weights)

        key = key_of(self.fragment_id, self.leaving.start_step)
        mean, extras = core.arrive(spec.sync, left, like, key)
        return mean, copies | extras


def shares_everywhere(mesh: Mesh, messages: PyTree) -> jax.Array:
    """All-gather messages of all regions as one flat buffer, a share to each device.

    Returns `[D, R / D, n]`, D the size of the region axis: columns sharded over the
    devices of each region, so that no byte crosses twice between two regions. It keeps
    the layout of the all-gather: any change of it must come after the steps that hide
    the collective.
    """
    buffer = flat_buffer.pack(messages)
    num_shares = math.prod(mesh.shape[axis] for axis in INSIDE)
    padded = jnp.pad(buffer, ((0, 0), (0, -buffer.shape[1] % num_shares)))
    # Otherwise XLA would shard, gather and shard parts of it again.
    padded = jax.lax.with_sharding_constraint(padded, regional(mesh))

    # The type system cannot see that all shards are equal.
    return jax.shard_map(
        lambda rows: jax.lax.all_gather(rows, REGION),
        mesh=mesh,
        in_specs=P(REGION, INSIDE),
        out_specs=P(None, None, INSIDE),
        check_vma=False,
    )(padded)


def joined(mesh: Mesh, buffer: jax.Array, shapes: PyTree) -> PyTree:
    """Gather the shares of a buffer inside each region; unpack it, `[R, ...]`."""
    rows = everywhere(mesh, buffer)
    return flat_buffer.unpack(rows.reshape(-1, rows.shape[-1]), shapes)


def make_ring_sum(mesh: Mesh, rings: Any) -> Callable[[PyTree], PyTree]:
    """Make the sum over the shards: leaves `[D, ...]`, an entry each, to `[...]`.

    `rings` are a `sync.summed.ByRings`.
    """

    def of_shard(tree: PyTree) -> PyTree:
        return rings.ring_sum(jax.tree.map(lambda x: x[0], tree), REGION)

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
    """Compiled programs that send fragments and average them."""

    shares_mesh = True

    def __init__(self, spec: SyncSpec, in_one_buffer: bool):
        super().__init__(spec)
        self._in_one_buffer = in_one_buffer

    def send(self, sending: Sending) -> Sent:
        """Send a fragment; see `Exchange.send`. Times are of the outer mesh only."""
        return self._run(sending)

    def _make(self, spec: SyncSpec, fragment_id: int, memory: PyTree) -> Callable:
        shardings = spec.shardings

        def send(leaving: Leaving) -> Sent:
            crossing = MeshCrossing(
                spec, fragment_id, leaving, in_one_buffer=self._in_one_buffer
            )
            return core.start(crossing)

        everywhere = NamedSharding(spec.mesh, P())
        extras = dict.fromkeys(self.arrives_with(), everywhere)
        return spec.devices.jit(
            send,
            f"send fragment {fragment_id}",
            self._bytes(spec, fragment_id),
            out_shardings=(
                shardings.fragments[fragment_id],
                spec.kept_shardings(fragment_id) | extras,
                shardings.of_regions(fragment_id, memory),
            ),
        )
