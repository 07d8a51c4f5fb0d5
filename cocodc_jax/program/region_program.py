"""Train a loss with a method: inner steps, and the syncs that are due after them.

`RegionProgram` holds the compiled functions; the run itself is the `TrainState` that
goes in and comes out. Nothing here waits for a device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cocodc_jax.core.state import AppliedSync, TrainState
from cocodc_jax.core.sync import make_correct
from cocodc_jax.engine.crossing import Times
from cocodc_jax.engine.devices import LoweredProgram
from cocodc_jax.engine.frozen import Trainable, split
from cocodc_jax.engine.mesh import REGION, is_cpu, methods_in_own_context
from cocodc_jax.engine.segment import InnerSteps
from cocodc_jax.engine.sync_program import (
    Parts,
    SyncProgram,
    check_alive,
    check_like,
)
from cocodc_jax.engine.transfer import PINNED
from cocodc_jax.engine.transport import Transport
from cocodc_jax.program.assemble import checked
from cocodc_jax.program.batches import Batches
from cocodc_jax.program.inner_step import make_steps
from cocodc_jax.program.warm_start import Adopted, Adoption
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.model_state import AnyLossFn, ModelState
from cocodc_jax.sync.needs import UserInputs
from cocodc_jax.sync.regions import Regions

PyTree = Any

NOTHING = UserInputs()
AUTO = Transport()


class Output(NamedTuple):
    """Results of `RegionProgram.advance`, still on their devices.

    Attributes:
      losses: float32, or wider if the loss is, `[T, R]`.
      aux: the loss function's aux, each `[T, R]`.
      syncs: the syncs that were applied after the last step.
      bytes_sent: bytes one region had sent by the end of each step, including events.
    """

    losses: jax.Array
    aux: dict[str, jax.Array]
    syncs: tuple[AppliedSync, ...]
    bytes_sent: tuple[int, ...]


@methods_in_own_context
class RegionProgram(SyncProgram):
    """Inner steps of one method for one model on one mesh, and its syncs.

    Example: see `train.run_steps`. All mutable state is in the `TrainState` that goes
    in and comes out. Region arrays are donated: do not use an old state again. The
    syncs are those of a `SyncProgram`.
    """

    def __init__(
        self,
        loss_fn: AnyLossFn,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        method: Method | str,
        params: PyTree,
        regions: int | Regions,
        *,
        mesh: Mesh | None = None,
        fragments: Fragments | None = None,
        param_specs: PyTree | None = None,
        user_inputs: UserInputs = NOTHING,
        transport: Transport = AUTO,
        model_state: ModelState | None = None,
        local_regions: str = "auto",
        optimizer_memory: str = "device",
        trainable: Trainable = None,
    ):
        """Prepare the programs; nothing is compiled before the first call.

        Args:
          loss_fn: `(params, batch, key) -> (loss, aux)` of one region; aux is a dict of
            scalars. With a `model_state`, `(params, model_state, batch, key) -> (loss,
            (aux, new_model_state))`.
          optimizer: inner optimizer of every region. One that takes `value=` receives
            the region's loss, or the mean loss if regions exchange something at every
            step.
          method: from `cocodc_jax.methods`, or the name of one, with its defaults.
          params: one region's parameters, or their shapes.
          regions: M, or the speed of each region.
          mesh: inner mesh; by default as many regions in parallel as devices allow.
          fragments: how to cut the parameters; by default as the method does.
          param_specs: tree of `PartitionSpec`s over the mesh axes inside a region (Flax
            Linen: `nn.get_partition_spec(params)`); by default replicated.
          user_inputs: inputs that only the user can provide, for merges that need them,
            and `on_merge` for an optimizer that holds a copy of the parameters.
          transport: how messages cross regions.
          model_state: non-trained state, such as BatchNorm statistics, and whether
            regions average it.
          local_regions: how a device computes several regions: "batched", "in_turn", or
            "auto", the faster of both; see `LocalRegions.of`.
          optimizer_memory: "device", or "host" to keep the inner optimizer's state in
            host memory; see `engine/placement.py`.
          trainable: which parameters are trained: a tree of bools (or a prefix), a
            predicate on paths, "optimizer" for those that it updates, or None for all.

        Raises:
          ValueError: for an argument of the wrong type or value, or arguments that do
            not fit together.
        """
        setting = checked(
            loss_fn=loss_fn,
            optimizer=optimizer,
            method=method,
            params=params,
            regions=regions,
            mesh=mesh,
            fragments=fragments,
            user_inputs=user_inputs,
            transport=transport,
            model_state=model_state,
            trainable=trainable,
        )
        super().__init__(setting, param_specs, local_regions, optimizer_memory)

    def _use(self, parts: Parts) -> None:
        """Take the parts of the syncs, and make the inner steps."""
        super()._use(parts)
        setting = self.setting
        shardings = parts.first.shardings
        self._batches = Batches(
            self.mesh, self.num_regions, pads=is_cpu(self.mesh) and not setting.overlap
        )

        is_offloaded = any(
            x.memory_kind == PINNED for x in jax.tree.leaves(shardings.opt_state)
        )
        steps = make_steps(
            setting.trainer.loss_fn,
            setting.trainer.optimizer,
            self.mesh,
            parts.local,
            per_step=self.method.per_step,
            all_reduce=setting.transport.all_reduce,
            correct=make_correct(self.method.sync, self.fragments, self.num_regions),
            model_state=setting.trainer.model_state,
            optimizer_shardings=shardings.opt_state if is_offloaded else None,
        )
        # Losses are replicated inside a region: a process reads its own regions'.
        of_losses = NamedSharding(self.mesh, P(None, REGION))
        self.use_steps(InnerSteps(steps, region=shardings, losses=of_losses))

    @functools.cached_property
    def bytes_per_step(self) -> int:
        """Bytes one region sends at every inner step, without syncs."""
        if self.method.per_step is None or self.num_regions == 1:
            return 0
        state_bytes = self.model_state.averaged_bytes if self.model_state else 0
        params, _ = self._first.shapes
        return self.method.per_step.num_bytes(params) + state_bytes

    def list_programs(self, batches: PyTree) -> list[LoweredProgram]:
        """List the programs of the inner mesh that a run compiles; compiles nothing.

        The mesh may be of devices that do not exist here
        (`jax.experimental.topologies`). `batches` are shapes and dtypes of those of one
        scan, `[T, R, B, ...]`.
        """
        listing, recorder = self.recording()
        params, _ = split(self.param_shapes, self.trained)
        _, key_shape = listing._first.shapes
        key_data = recorder.put(key_shape, NamedSharding(self.mesh, P()))
        listing._first.make(params, key_data)

        state = self.abstract()
        num_steps = jax.tree.leaves(batches)[0].shape[0]
        shapes, counted = listing._batches.abstract(batches)
        listing._inner_steps(state, shapes, counted, num_steps)
        listing._read.mean(state.region.params)
        if self._syncs is not None:
            listing._list_syncs(state, batches, self._syncs.num_rounds)

        programs = recorder.programs.values()
        return [self._listed(program, num_steps) for program in programs]

    def _list_syncs(self, state: TrainState, batches: PyTree, rounds: int) -> None:
        """Follow the schedule until every fragment was sent and merged."""
        assert self.method.sync is not None
        interval = self.method.sync.schedule.sync_interval
        missing = set(range(len(self.fragments)))

        while missing or state.step < rounds * interval:
            num_steps = self.steps_to_event(state) or 0
            of_steps = jax.tree.map(
                lambda x, n=num_steps: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype),
                batches,
            )
            state, output = self.advance(state, of_steps)
            missing -= {sync.fragment_id for sync in output.syncs}

    def _listed(self, listed: LoweredProgram, num_steps: int) -> LoweredProgram:
        """Fill in the inner steps of a program, and what regions send at each."""
        if listed.name == "inner steps":
            sent_bytes = num_steps * self.bytes_per_step
            return listed._replace(num_steps=num_steps, sent_bytes=sent_bytes)
        if "inner steps" in listed.name:
            batches = jax.tree.leaves(listed.arguments[1])
            return listed._replace(num_steps=batches[0].shape[0])
        return listed

    @property
    def length_bucket(self) -> int | None:
        """Steps that batches are padded to a multiple of; None if they are not."""
        return self._batches.length_bucket

    def advance(
        self,
        state: TrainState,
        batches: PyTree,
        times: Times = (0.0, 0.0),
        on_steps: Callable[[int, jax.Array], None] = lambda step, losses: None,
    ) -> tuple[TrainState, Output]:
        """Run T inner steps, then the events that are due after them.

        Args:
          state: donated.
          batches: leaves `[T, R, B, ...]`, on the mesh or on the host; T at most
            `steps_to_event(state)`.
          times: measured seconds of an inner step and of a sync, 0 if not yet known;
            for measured schedules.
          on_steps: called with the step after the inner steps and their losses as soon
            as they are dispatched; the events may wait for other regions.

        Raises:
          ValueError: if T leads past the next event, the second axis of `batches` is
            not the regions, or `state` was donated before.
        """
        check_alive(state)
        num_steps = self._batches.num_steps(batches)
        limit = self.steps_to_event(state)
        if limit is not None and num_steps > limit:
            raise ValueError(
                f"{num_steps} steps lead past the next event, which is {limit} steps "
                "ahead; pass at most `steps_to_event(state)`"
            )

        placed, counted = self._batches.for_steps(batches)
        outputs: tuple = ()

        def dispatched(step: int, padded: tuple) -> None:
            nonlocal outputs
            outputs = padded
            if jax.tree.leaves(padded)[0].shape[0] > num_steps:
                outputs = self._read.first(padded, num_steps)
            on_steps(step, outputs[0])

        bytes_before = state.bytes_sent
        new_state, _, syncs = self.run_segment(
            state, placed, num_steps, counted, times, dispatched
        )

        sent = [bytes_before + i * self.bytes_per_step for i in range(1, num_steps + 1)]
        sent[-1] += new_state.bytes_sent - bytes_before
        new_state = dataclasses.replace(new_state, bytes_sent=sent[-1])
        losses, aux = outputs
        return new_state, Output(losses, aux, syncs, tuple(sent))

    def adopt(self, state: TrainState, of: RegionProgram) -> Adopted:
        """Continue from the state of another program of the same model.

        The other program is `of`; its `state` is donated. It may have another number of
        regions, mesh, schedule, method or optimizer. State that fits is kept, the rest
        is reported by name; see `warm_start` for the rules.

        Raises:
          ValueError: if `of` has other parameters.
        """
        check_alive(state)
        check_like(of.param_shapes, self.param_shapes)
        return Adoption(self, of).run(state)
