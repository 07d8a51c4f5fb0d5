"""A trainer's steps in one program with the messages that cross meanwhile.

On accelerators whose regions share a fabric, a device runs one program after another,
so a message in a separate program blocks the steps. A window is a scan of the trainer's
step with the starts before it and the merge after it, as `engine/segment.py` builds it
for this package's inner steps. The compiler begins the collective before the loop and
ends it after the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import RegionState, TrainState
from cocodc_jax.engine.devices import LoweredProgram
from cocodc_jax.engine.mesh import in_own_context
from cocodc_jax.engine.segment import InnerSteps
from cocodc_jax.region_sync.layout import relabeled
from cocodc_jax.region_sync.seam import RegionSyncState, Seam

PyTree = Any

# `step(carry, batch) -> (carry, outputs)` of all regions, as `jax.lax.scan` takes it.
Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


class Window:
    """A trainer's step, scanned; made by `RegionSync.window`."""

    def __init__(
        self,
        seam: Seam,
        step: Step,
        params_of: Callable[[PyTree], PyTree],
        carry: PyTree,
    ):
        """Prepare the programs, for carries like `carry`; compiles nothing."""
        self._seam = seam
        self._step = step
        leaves, self._treedef = jax.tree.flatten(carry)
        places = _places(leaves, jax.tree.leaves(params_of(carry)))

        # Where the averaged arrays are in a carry, and all other leaves.
        self._averaged = [
            place
            for place, path in zip(places, seam.selection.paths, strict=True)
            if path is not None
        ]
        self._rest = [i for i in range(len(leaves)) if i not in set(self._averaged)]

        layout = seam.layout
        self._steps = InnerSteps(
            run=self._run,
            region=RegionState(
                params=layout.regional,
                opt_state=[layout.sharding_of(leaves[i]) for i in self._rest],
                key=seam.program.shardings.region.key,
            ),
            losses=None,
        )
        seam.program.use_steps(self._steps)

    @in_own_context()
    def __call__(
        self, carry: PyTree, batches: PyTree, state: RegionSyncState
    ) -> tuple[PyTree, PyTree, RegionSyncState]:
        """Run the next steps, and the events that are due around them.

        Args:
          carry: what the step carries; donated.
          batches: leaves `[T, ...]`, T at most `steps_to_event(state)`.
          state: of the syncs.

        Returns:
          The carry, the step's outputs `[T, ...]`, and the state.

        Raises:
          ValueError: if T leads past the next event.
        """
        num_steps = jax.tree.leaves(batches)[0].shape[0]
        ahead = self._seam.steps_to_event(state)
        if num_steps > ahead:
            raise ValueError(
                f"batches has {num_steps} steps, which lead past the next event, "
                f"{ahead} steps ahead; pass at most steps_to_event(state)"
            )

        leaves = self._treedef.flatten_up_to(carry)
        run, (outputs, _), applied = self._seam.program.run_segment(
            self._entered(leaves, state),
            jax.tree.map(self._batch, batches),
            num_steps,
        )
        new_carry = self._left(leaves, run.region)
        return new_carry, outputs, self._seam.state_of(run, state.keys, applied)

    @in_own_context()
    def list_programs(self, carry: PyTree, batches: PyTree) -> list[LoweredProgram]:
        """List the programs that a run compiles; compiles nothing.

        Those with "inner steps" in their name contain `num_steps` steps.

        Args:
          carry: shapes, dtypes and shardings; the devices need not exist here.
          batches: of one step, leaves `[...]`.
        """
        listing, recorder = self._seam.program.recording()
        listing.use_steps(self._steps)
        leaves = [
            relabeled(x, self._seam.layout.sharding_of(x))
            for x in self._treedef.flatten_up_to(carry)
        ]
        shapes = listing.abstract()
        state = dataclasses.replace(
            shapes, region=self._region(leaves, shapes.region.key)
        )

        assert listing.method.sync is not None
        interval = listing.method.sync.schedule.sync_interval
        while state.step < 2 * interval:
            num_steps = listing.steps_to_event(state) or interval
            of_steps = jax.tree.map(
                lambda x, n=num_steps: jax.ShapeDtypeStruct(
                    (n, *x.shape),
                    x.dtype,
                    sharding=_with_steps(self._batch(x).sharding),
                ),
                batches,
            )
            state, _, _ = listing.run_segment(state, of_steps, num_steps)

        return [_with_num_steps(listed) for listed in recorder.programs.values()]

    def _run(
        self, region: RegionState, batches: PyTree, *unused: Any
    ) -> tuple[RegionState, tuple[PyTree, dict]]:
        """Scan the trainer's step; traced in the engine's programs."""
        del unused
        leaves = self._leaves(region)
        carry, outputs = jax.lax.scan(
            self._step, self._treedef.unflatten(leaves), batches
        )
        new_region = self._region(self._treedef.flatten_up_to(carry), region.key)
        return new_region, (outputs, {})

    @property
    def _paths(self) -> list[str]:
        return [path for path in self._seam.selection.paths if path is not None]

    def _region(self, leaves: list[Any], key: Any) -> RegionState:
        return RegionState(
            params={
                path: leaves[place]
                for place, path in zip(self._averaged, self._paths, strict=True)
            },
            opt_state=[leaves[i] for i in self._rest],
            key=key,
        )

    def _leaves(self, region: RegionState) -> list[Any]:
        """Return the leaves of the carry that a region state has; inverts `_region`."""
        leaves: list[Any] = [None] * (len(self._averaged) + len(self._rest))
        for place, path in zip(self._averaged, self._paths, strict=True):
            leaves[place] = region.params[path]
        for place, x in zip(self._rest, region.opt_state, strict=True):
            leaves[place] = x
        return leaves

    def _entered(self, leaves: list[Any], state: RegionSyncState) -> TrainState:
        arrays = [jax.numpy.asarray(x) for x in leaves]
        sharding_of = self._seam.layout.sharding_of
        entered = [relabeled(x, sharding_of(x)) for x in arrays]
        keys = self._seam.keys_at(state, state.step)
        return TrainState(
            region=self._region(entered, keys),
            sync=state.sync,
            step=state.step,
            bytes_sent=state.bytes_sent,
        )

    def _left(self, leaves: list[Any], region: RegionState) -> PyTree:
        """Return the trainer's carry, with the shardings that it had."""
        new_leaves = [
            relabeled(x, old.sharding) if hasattr(old, "sharding") else x
            for x, old in zip(self._leaves(region), leaves, strict=True)
        ]
        return self._treedef.unflatten(new_leaves)

    def _batch(self, x: Any) -> Any:
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            return relabeled(x, self._seam.layout.sharding_of(x))
        return x


def _places(leaves: list[Any], params: list[Any]) -> list[int]:
    """Return where the leaves of the parameters are among those of the carry."""
    index = {id(leaf): i for i, leaf in enumerate(leaves)}
    if len(index) < len(leaves):
        raise ValueError(
            "carry holds one array twice; give a carry whose arrays differ, such as "
            "the one that a step returned"
        )

    missing = [leaf for leaf in params if id(leaf) not in index]
    if missing:
        raise ValueError(
            "params_of(carry) returns arrays that are not in the carry: it must pick "
            "the parameters out of it, as lambda carry: carry.params does"
        )
    return [index[id(leaf)] for leaf in params]


def _with_num_steps(listed: LoweredProgram) -> LoweredProgram:
    """Fill in the number of steps of a program that contains steps."""
    if "inner steps" not in listed.name:
        return listed
    batches = jax.tree.leaves(listed.arguments[1])
    return listed._replace(num_steps=batches[0].shape[0])


def _with_steps(sharding: Any) -> Any:
    """Return the sharding of a stack of steps."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, P(None, *sharding.spec))
