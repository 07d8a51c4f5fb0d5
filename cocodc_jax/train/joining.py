"""A region joins from another region's memory: the copy that it receives, and its use.

The copy holds the state that is equal in all regions after the events of one step:
outer parameters, outer optimizer states, the schedule's state, and the outer fragments
that the syncs in flight were measured from. The region that joins starts from the outer
parameters, with a fresh inner optimizer (except the step of its schedules), fresh
compressors and a new key. It receives the syncs that are in flight, and takes part in
the means of those that start after the copy.

A region that was only cut off, or silent, keeps its progress. With theta_m its
parameters and theta_s the last outer parameters in common with the others, it continues
from theta_g + (theta_m - theta_s) with its inner optimizer and compressors, so its next
pseudo-gradients contain that progress. Messages that it sent before, and that were
counted without its knowledge, are counted twice. Progress that its part of a cut
network merged in the turn in which it first missed the others is part of theta_s, and
lost.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from cocodc_jax.core.state import InFlight, PendingMean, PyTree, SyncState, TrainState
from cocodc_jax.elastic.messages import Snapshot, SyncId
from cocodc_jax.engine import transfer
from cocodc_jax.engine.sync_program import SyncProgram
from cocodc_jax.program.fit import at_step
from cocodc_jax.sync.fragments import Fragment
from cocodc_jax.sync.inner_keys import fold_keys, has_keys
from cocodc_jax.sync.needs import STALE


class Carried(NamedTuple):
    """The state that a region carries on when the others went on without it."""

    state: TrainState
    # The last outer parameters in common with the regions that were lost last, and the
    # indices of those. With other regions, `state` has the parameters in common.
    shared: tuple[Fragment, ...] | None = None
    missed: frozenset[int] = frozenset()
    boot: int | None = None  # The life of the region that it had, see `elastic.lives`.

    def to_join(self, leader: int) -> "Carried":
        """Return what counts where `leader`, a region, sends the copy to start from.

        With a leader that was not lost, the outer parameters in common are the last
        ones.
        """
        return self if leader in self.missed else self._replace(shared=None)


def copy_of(program: SyncProgram, state: TrainState) -> Snapshot:
    """Copy to the host what a joining region needs; waits for the outer steps."""
    synchronized = program.synchronize(state)
    assert synchronized.sync is not None
    arrays = [synchronized.sync.outer]

    flights = {}
    for (k, start_step), flight in sorted(synchronized.sync.in_flight.items()):
        has_mean = not isinstance(flight.mean, PendingMean)
        flights[f"{k}_{start_step}"] = has_mean
        if has_mean:
            arrays.append(flight.mean)
        if STALE in flight.kept:
            arrays.append(flight.kept[STALE])

    header = {
        "schedule": synchronized.sync.schedule.to_json(),
        "bytes_sent": synchronized.bytes_sent,
        "has_mean": flights,
    }
    # A copy: the next outer step donates the buffers.
    frames = tuple(transfer.whole(x).tobytes() for x in jax.tree.leaves(arrays))
    return Snapshot(synchronized.step, header, frames)


def adopt(
    program: SyncProgram,
    params: PyTree,
    key: jax.Array,
    copy: Snapshot,
    carried: Carried | None = None,
) -> TrainState:
    """Return the state of a region that continues from another region's copy."""
    assert program.method.schedule is not None
    schedule = program.method.schedule.restore(copy.header["schedule"])
    abstract = program.abstract(schedule).sync
    assert abstract is not None
    frames = iter(copy.arrays)
    outer = _read(frames, abstract.outer)

    def with_outer(state: TrainState, flights: dict[SyncId, InFlight]) -> TrainState:
        assert state.sync is not None
        # The next message has the others' rank.
        has_compressors = carried.state if carried else state
        sync = dataclasses.replace(
            state.sync,
            outer=outer,
            schedule=schedule,
            compressors=program.compressors_of(has_compressors, schedule.rank),
            in_flight=flights,
        )

        return dataclasses.replace(
            state, sync=sync, step=copy.step, bytes_sent=copy.header["bytes_sent"]
        )

    trained = program.outer_params(with_outer(program.init(params, key), {}))
    if carried is not None:
        trained = jax.tree.map(jax.numpy.add, trained, _work(program, carried))

    params = jax.tree.map(
        lambda x, like: transfer.whole(x).astype(like.dtype), trained, params
    )

    # Before it left, the region has used keys derived from the run's.
    state = program.init(params, jax.random.fold_in(key, copy.step))
    region = state.region
    if carried is not None:
        mine = carried.state.region
        opt_state = mine.opt_state
        if program.on_merge is not None:  # Its parameters moved to `region.params`.
            moved = jax.jit(jax.vmap(program.on_merge))
            opt_state = moved(opt_state, mine.params, region.params)

        region = region._replace(opt_state=opt_state, model_state=mine.model_state)
    elif has_keys(region.opt_state):
        fold = jax.vmap(lambda state: fold_keys(state, copy.step))
        region = region._replace(opt_state=jax.jit(fold)(region.opt_state))

    # Learning rates continue at the run's step; moments are fresh.
    done = np.full(program.num_regions, copy.step)
    opt_state = at_step(region.opt_state, done, program.accumulation)
    region = region._replace(opt_state=opt_state)
    state = dataclasses.replace(state, region=region)

    flights = {}
    for sync in sorted(abstract.in_flight):  # In the order of `copy_of`.
        flights[sync] = _flight(
            program=program,
            state=state,
            sync=sync,
            abstract=abstract,
            copy=copy,
            frames=frames,
        )
    if next(frames, None) is not None:
        raise ValueError("the copy has more arrays than this program's state")
    return with_outer(state, flights)


def _work(program: SyncProgram, carried: Carried) -> PyTree:
    """Return a region's progress since the last outer parameters in common."""
    state = carried.state
    assert state.sync is not None
    if carried.shared is not None:
        outer = state.sync.outer._replace(params=carried.shared)
        sync = dataclasses.replace(state.sync, outer=outer)
        state = dataclasses.replace(state, sync=sync)
    return jax.tree.map(
        jax.numpy.subtract, program.mean_params(state), program.outer_params(state)
    )


def _flight(
    program: SyncProgram,
    state: TrainState,
    sync: SyncId,
    abstract: SyncState,
    copy: Snapshot,
    frames: Iterator[bytes],
) -> InFlight:
    """Return a sync in flight whose messages other regions have sent."""
    k, start_step = sync
    like = abstract.in_flight[sync]
    if copy.header["has_mean"][f"{k}_{start_step}"]:
        mean = _read(frames, like.mean)
    else:
        (rank,) = (p.rank for p in abstract.schedule.in_flight if p.sync_id == sync)
        mean = program.elastic.awaited(sync, rank)

    # Copies are as if it had no progress.
    kept = {
        name: _read(frames, x) if name == STALE else program.copy_fragment(state, k)
        for name, x in like.kept.items()
    }

    return InFlight(mean, kept)


def _read(frames: Iterator[bytes], like: PyTree) -> PyTree:
    """Read the arrays of a tree of shapes from frames of bytes."""

    def one(shape: jax.ShapeDtypeStruct) -> jax.Array:
        frame = next(frames, b"")
        if len(frame) != shape.size * shape.dtype.itemsize:
            raise ValueError(
                f"the copy has an array of {len(frame)} bytes where this program has "
                f"{shape.dtype}{list(shape.shape)}: another model or method"
            )

        value = np.frombuffer(frame, shape.dtype).reshape(shape.shape)
        if shape.sharding.is_fully_addressable:
            return jax.device_put(value, shape.sharding, may_alias=False)
        return transfer.put(np.array(value), shape.sharding)

    return jax.tree.map(one, like)


def max_frame_bytes(program: SyncProgram) -> int:
    """Return the size of the largest frame that regions send."""
    sync = program.abstract().sync
    leaves = jax.tree.leaves(sync.outer if sync else ())
    sizes = [x.size * x.dtype.itemsize for x in leaves]
    return max(program.elastic.max_row_bytes, *sizes)
