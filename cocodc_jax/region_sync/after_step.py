"""One line after the step of any trainer: `RegionSync`.

    sync = cc.RegionSync("streaming_diloco", params, regions=4)
    state = sync.init(params)
    for batch in data:
        train_state, metrics = train_step(train_state, batch)   # The trainer's own.
        params, state = sync.after_step(params_of(train_state), state)

The trainer owns its step, mesh, optimizer, data, evaluation and checkpoints. A
`RegionSync` owns what regions exchange: fragments in flight, the outer model, the
schedule, and the membership of regions that may leave and return. Both meet in the
parameters' tree.

Its engine is a `SyncProgram`, which is a `RegionProgram` without the inner steps, so
the numbers are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import optax

from cocodc_jax import methods
from cocodc_jax.core.state import AppliedSync, RegionState, TrainState
from cocodc_jax.elastic.link import AskedToStopError, LeftBehindError
from cocodc_jax.engine.crossing import Trainer
from cocodc_jax.engine.frozen import copied
from cocodc_jax.engine.mesh import in_own_context
from cocodc_jax.engine.sync_program import SyncProgram, make_setting
from cocodc_jax.engine.transport import Transport
from cocodc_jax.region_sync.layout import first_region, layout_of
from cocodc_jax.region_sync.membership import Membership, say_return
from cocodc_jax.region_sync.seam import RegionSyncState, Seam
from cocodc_jax.region_sync.trees import Leaves, Selection
from cocodc_jax.region_sync.window import Step, Window
from cocodc_jax.sync import needs
from cocodc_jax.sync.fragments import Fragments
from cocodc_jax.sync.method import Method
from cocodc_jax.sync.needs import LossFn, UserInputs
from cocodc_jax.sync.outer import RegionalOuter

PyTree = Any

NOTHING = UserInputs()
AUTO = Transport()

# The engine's stand-in for the trainer's optimizer. Its state is shaped like the
# parameters, so a trainer's second moments can take its place.
_MOMENTS = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jax.numpy.zeros_like, params),
    update=lambda updates, state, params=None: (updates, state),
)


class RegionSync:
    """Sends and merges fragments between the steps of any trainer.

    Attributes:
      method: bound to the regions.
      fragments: how the averaged arrays are cut; a fragment is a flat dict by path.
      selection: which leaves of the trainer's tree are averaged.
      layout: how they are placed on the trainer's devices.
      program: the engine, whose inner steps are the trainer's.
    """

    def __init__(
        self,
        method: Method | str,
        params: PyTree,
        regions: int,
        *,
        transport: Transport = AUTO,
        fragments: Fragments | None = None,
        user_inputs: UserInputs = NOTHING,
        loss_fn: LossFn | None = None,
        donate: bool = True,
        run: str = "",
        should_stop: Callable[[], bool] = lambda: False,
    ):
        """Prepare the syncs; nothing is compiled before the first one.

        Args:
          method: from `cocodc_jax.methods`, or the name of one, with its defaults. The
            trainer has the inner optimizer.
          params: the trainer's parameters, or their shapes with shardings. Floating-
            point arrays are averaged; all other leaves stay the region's own. Leaves
            are `[R, ...]` where one program trains all regions, over any axis of any
            mesh, and `[...]` where each region is a process of a `jax.distributed`
            job, or a job of its own (`exchange="elastic"`).
          regions: R, the regions of the run.
          transport: how messages cross regions.
          fragments: how to cut one region's parameters; by default as the method does.
          user_inputs: inputs that only the user can provide, for merges that need them.
          loss_fn: `(params, batch, key) -> (loss, aux)` of one region, for merges that
            need the gradient of the last batch.
          donate: whether `after_step` may reuse the memory of the parameters that it
            changes; the old tree must then not be used again.
          run: for elastic regions, a name that tells this run from others; regions of
            other runs are ignored. It should contain what must be equal in all regions
            and is not in the method, such as the data and the trainer's settings.
          should_stop: for elastic regions, whether this one was asked to stop; it then
            waits for no other region.

        Raises:
          ValueError: for a method that exchanges messages at every step or needs the
            inner optimizer, for arguments that do not fit together, and for a folder
            of `Place.via` that cannot be reached.
        """
        if isinstance(method, str):
            method = methods.get(method)
        _check_method(method)
        if transport.overlap != "yes":
            transport = dataclasses.replace(transport, overlap="no")

        self.selection = Selection.of(params)
        arrays = self.selection.take(params)
        self.layout = layout_of(arrays, regions, _form(arrays, transport))
        if fragments:
            fragments = self.selection.fragments(fragments)
        setting = make_setting(
            method,
            self._one_region(arrays),
            regions,
            Trainer(
                loss_fn=self._loss_of(loss_fn, method, params),
                user_inputs=_inputs_of_arrays(user_inputs),
                optimizer=_MOMENTS,
            ),
            transport,
            mesh=self.layout.mesh,
            fragments=fragments,
        )
        self.program = SyncProgram(setting, self.layout.specs)

        self._seam = Seam(self.selection, self.layout, self.program)
        self._wants_batch = needs.wants_batch(self.method.needs)
        self._second_moment = user_inputs.second_moment
        self._donates = donate
        self._run_key = jax.random.key(0)
        self._overlaps = transport.overlap == "yes"
        self._membership: Membership | None = None
        if transport.exchange == "elastic":
            assert transport.place is not None
            self._membership = Membership(
                self.program, transport.place, run, should_stop
            )

    @property
    def method(self) -> Method:
        """The method, bound to the regions."""
        return self.program.method

    @property
    def fragments(self) -> Fragments:
        """The cut of the averaged arrays."""
        return self.program.fragments

    @in_own_context()
    def init(self, params: PyTree, key: jax.Array | None = None) -> RegionSyncState:
        """Make the state before the first step; reads `params` and keeps none of them.

        Args:
          params: the trainer's. Where leaves are `[R, ...]` all regions must be equal;
            the first one becomes the outer model.
          key: PRNG key, equal in all regions, for compressors and merges that draw;
            None is `jax.random.key(0)`.
        """
        self._run_key = jax.random.key(0) if key is None else key
        arrays = self.layout.first(self.selection.take(params))
        run = self.program.init(arrays, self._run_key)
        return self._seam.state_of(run)

    @in_own_context()
    def join(
        self, params: PyTree, state: RegionSyncState
    ) -> tuple[PyTree, RegionSyncState]:
        """Take part in a run of elastic regions; without them, change nothing.

        If the others have begun, the results are of the step that they are at:
        `state.step` has changed, and the trainer must move its data there. The trainer
        decides what its optimizer starts from.

        Args:
          params: the trainer's, new or from its checkpoint; donated.
          state: from `init` or `restore`.

        Raises:
          TimeoutError: if no region admits this one.
          LeftBehindError: if `state` is ahead of the others.
          SupersededError: if this region was started again elsewhere; this process must
            end.
        """
        if self._membership is None:
            return params, state

        first = self.layout.first(self.selection.take(params))
        run = self._without_params(state)
        joined = self._membership.join(run, first, self._run_key)
        if joined is run:
            return params, state
        return self._left(params, joined), self._seam.state_of(joined)

    @property
    def regions(self) -> tuple[int, ...]:
        """Indices of the regions that take part, as far as this region knows."""
        if self._membership is None:
            return tuple(range(self.program.num_regions))
        return self._membership.regions

    def regions_in_mean(self, applied: AppliedSync) -> tuple[int, ...] | None:
        """Return the regions whose messages are in a merged mean.

        Args:
          applied: one of `state.applied`, of the last steps.

        Returns:
          Their indices; None if the mean came with another region's copy, or from a
          checkpoint.
        """
        if self._membership is None:
            return tuple(range(self.program.num_regions))
        sync_id = (applied.fragment_id, applied.start_step)
        return self.program.elastic.in_mean.get(sync_id)

    def finish(self) -> None:
        """Wait at the end of a run until no other region needs this one.

        Leaving the context without an exception calls it.
        """
        if self._membership is not None:
            self._membership.finish()

    def leave(self) -> None:
        """Announce that this region stops, so that no other one waits for it."""
        if self._membership is not None:
            self._membership.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if self._membership is None:
            return
        try:
            if kind is None:
                self._membership.finish()
        finally:
            self._membership.close()

    def window(
        self, step: Step, params_of: Callable[[PyTree], PyTree], carry: PyTree
    ) -> Window:
        """Return a scan of the trainer's step whose messages cross while it computes.

        It is for regions that share a fabric in one program, with
        `Transport("program", overlap="yes")`; otherwise the events come after the scan.
        Call it in place of step and `after_step`.

        Args:
          step: `step(carry, batch) -> (carry, outputs)` of all regions, traceable.
          params_of: picks the parameters out of a carry.
          carry: the first one, or its shapes with shardings.
        """
        if not self.layout.has_region_axis:
            raise ValueError(
                "window needs the regions in one program, leaves [R, ...]; call "
                "after_step between steps"
            )
        return Window(self._seam, step, params_of, carry)

    def steps_to_event(self, state: RegionSyncState) -> int:
        """Return the steps until `after_step` has something to do."""
        return self._seam.steps_to_event(state)

    def after_step(
        self,
        params: PyTree,
        state: RegionSyncState,
        *,
        num_steps: int = 1,
        batch: PyTree = None,
        opt_state: PyTree = None,
    ) -> tuple[PyTree, RegionSyncState]:
        """Start, receive and merge what is due after the trainer's step.

        On steps without an event it returns `params` itself and costs a few
        microseconds. It waits for the network only if a mean is due.

        Args:
          params: the trainer's, after its step; those of a step with an event are
            donated, see `donate`.
          state: the state of the step before.
          num_steps: steps done since, at most `steps_to_event(state)`.
          batch: the last batch, leaves `[R, B, ...]` (`[B, ...]` where parameters have
            no axis of regions), for methods that need it.
          opt_state: the inner optimizer's state, for methods that need its moments.

        Returns:
          The parameters, with the trainer's structure and shardings, and the state.

        Raises:
          ValueError: if `num_steps` leads past the next event, or the method needs a
            batch or moments that were not given.
          SupersededError: if this elastic region was started again elsewhere; it must
            end, and not be started again.
        """
        if self._overlaps:
            raise ValueError(
                "overlap='yes' has messages cross in the trainer's own program: call "
                "window(step, params_of, carry) in place of the step and after_step"
            )

        step = state.step + num_steps
        if step < state.next_step:
            new_state = dataclasses.replace(state, step=step, applied=())
            if self._membership is not None and self._membership.is_due(step):
                return self.meet(params, new_state)
            return params, new_state

        if step > state.next_step:
            raise ValueError(
                f"num_steps={num_steps} leads past the next event, which is "
                f"{self.steps_to_event(state)} steps ahead; call after_step there"
            )
        return self._events(params, state, batch, opt_state)

    @in_own_context()
    def _events(
        self, params: PyTree, state: RegionSyncState, batch: PyTree, opt_state: PyTree
    ) -> tuple[PyTree, RegionSyncState]:
        """Apply the events of the next step."""
        batch = self._batch(batch)  # Refused before the parameters are donated.
        entered = self._entered(params, state, state.next_step, opt_state)
        run, applied = self.program.apply_events(entered, batch)

        if self._membership is not None:
            try:
                self._membership.report(run, applied)
            except LeftBehindError as error:
                return self._come_back(params, run, error)
        return self._left(params, run), self._seam.state_of(run, state.keys, applied)

    @in_own_context()
    def meet(
        self, params: PyTree, state: RegionSyncState
    ) -> tuple[PyTree, RegionSyncState]:
        """Admit the elastic regions that wait, between two steps.

        `after_step` does so at every event, and about once a beat. A trainer may call
        it during long work between two steps, such as an evaluation; all processes of a
        region must call it at the same step.
        """
        if self._membership is None:
            return params, state

        run = self._without_params(state)
        try:
            self._membership.report(run)
        except LeftBehindError as error:
            entered = self._entered(params, state, state.step)
            return self._come_back(params, entered, error)
        return params, state

    def _come_back(
        self, params: PyTree, run: TrainState, error: LeftBehindError
    ) -> tuple[PyTree, RegionSyncState]:
        """Rejoin the others, who went on without this region, with its progress."""
        assert self._membership is not None
        if error.state is None:
            raise error
        with_work = dataclasses.replace(error.state.state, region=run.region)
        carried = error.state._replace(state=with_work)

        say_return(error)
        first = {path: x[0] for path, x in run.region.params.items()}
        try:
            joined = self._membership.join(run, first, self._run_key, carried)
        except AskedToStopError:  # The trainer saves what the region has.
            self._membership.close()
            joined = with_work
        return self._left(params, joined), self._seam.state_of(joined)

    @in_own_context()
    def land(
        self, params: PyTree, state: RegionSyncState
    ) -> tuple[PyTree, RegionSyncState]:
        """Apply all fragments in flight now, as at the end of a run; donates `params`.

        Raises:
          ValueError: if the method's merges need a batch.
        """
        run, dropped = self.program.land(self._entered(params, state, state.step))
        if dropped:
            raise ValueError(
                f"method={self.method.name!r} cannot merge {len(dropped)} fragments in "
                "flight early: its merge needs the batch of the step that it is due at"
            )
        return self._left(params, run), self._seam.state_of(run, state.keys)

    @in_own_context()
    def outer_params(self, state: RegionSyncState, like: PyTree) -> PyTree:
        """Return the outer model, one region's parameters.

        Leaves that are not averaged are those of `like`, of its first region if it has
        a region axis. Regional outer models are averaged.
        """
        run = self._without_params(state)
        if self._is_regional:
            run = self._entered(like, state, state.step, copies=True)
        return self._one_tree(like, self.program.outer_params(run))

    @in_own_context()
    def mean_params(self, params: PyTree, state: RegionSyncState) -> PyTree:
        """Return the mean of the parameters of the regions that this program trains."""
        run = self._entered(params, state, state.step, copies=True)
        return self._one_tree(params, self.program.mean_params(run))

    @in_own_context()
    def checkpoint(self, state: RegionSyncState) -> tuple[dict[str, PyTree], dict]:
        """Return a state as arrays and a JSON value, for any checkpoint library.

        It waits for means in flight, and for values that the schedule has to read.
        """
        run = self.program.synchronize(self._without_params(state))
        assert run.sync is not None
        arrays = {"sync": run.sync.arrays, "keys": state.keys}
        note = {
            "method": self.method.name,
            "schedule": run.sync.schedule.to_json(),
            "step": state.step,
            "bytes_sent": state.bytes_sent,
        }
        return arrays, note

    @in_own_context()
    def abstract(self, note: dict) -> dict[str, PyTree]:
        """Return shapes, dtypes and shardings of a checkpoint's arrays.

        Args:
          note: the JSON value that was saved with them.

        Raises:
          ValueError: if it is of another method.
        """
        shapes = self.program.abstract(self._schedule(note))
        assert shapes.sync is not None
        return {"sync": shapes.sync.arrays, "keys": shapes.region.key}

    @in_own_context()
    def restore(self, arrays: dict[str, PyTree], note: dict) -> RegionSyncState:
        """Return the state of a checkpoint; inverts `checkpoint`."""
        shapes = self.program.abstract(self._schedule(note))
        assert shapes.sync is not None
        run = TrainState(
            region=shapes.region,
            sync=shapes.sync.with_arrays(arrays["sync"]),
            step=note["step"],
            bytes_sent=note["bytes_sent"],
        )
        return self._seam.state_of(run, arrays["keys"])

    def _schedule(self, note: dict) -> Any:
        if note["method"] != self.method.name:
            raise ValueError(
                f"the checkpoint is of method={note['method']!r}, but this RegionSync "
                f"is of {self.method.name!r}"
            )
        assert self.method.schedule is not None
        return self.method.schedule.restore(note["schedule"])

    @property
    def _is_regional(self) -> bool:
        assert self.method.sync is not None
        return isinstance(self.method.sync.outer, RegionalOuter)

    def _entered(
        self,
        params: PyTree,
        state: RegionSyncState,
        step: int,
        opt_state: PyTree = None,
        copies: bool = False,
    ) -> TrainState:
        """Return the engine's state at a step, with the trainer's parameters."""
        arrays = self.selection.take(params)
        if copies or not self._donates:
            arrays = copied(arrays)

        moments = ()
        if self._second_moment is not None and needs.wants_state(self.method.needs):
            if opt_state is None:
                raise ValueError(
                    f"method={self.method.name!r} needs the inner optimizer's second "
                    "moment: pass after_step(..., opt_state=)"
                )
            second_moment = self.selection.take(self._second_moment(opt_state))
            moments = self.layout.enter(copied(second_moment))

        region = RegionState(
            params=self.layout.enter(arrays),
            opt_state=moments,
            key=self._seam.keys_at(state, step),
        )
        return TrainState(region, state.sync, step, state.bytes_sent)

    def _without_params(self, state: RegionSyncState) -> TrainState:
        """Return the engine's state without parameters."""
        region = RegionState(params={}, opt_state=(), key=state.keys)
        return TrainState(region, state.sync, state.step, state.bytes_sent)

    def _left(self, params: PyTree, run: TrainState) -> PyTree:
        """Return the trainer's tree and shardings with the engine's parameters."""
        shardings = {
            path: x.sharding for path, x in self.selection.take(params).items()
        }
        arrays = self.layout.leave(run.region.params, shardings)
        return self.selection.put(params, arrays)

    def _batch(self, batch: PyTree) -> PyTree:
        if not self._wants_batch:
            return None
        if batch is None:
            raise ValueError(
                f"method={self.method.name!r} needs the last batch: pass "
                "after_step(..., batch=)"
            )
        if self.layout.has_region_axis:
            return batch
        return jax.tree.map(lambda x: x[None], batch)

    def _one_tree(self, like: PyTree, arrays: Leaves) -> PyTree:
        """Return one region's tree, with the leaves of `like` that are not averaged."""
        if self.layout.has_region_axis:
            like = self.selection.map_others(first_region, like)
        return self.selection.put(like, arrays)

    def _one_region(self, arrays: Leaves) -> Leaves:
        """Return the shapes of one region's arrays."""
        lead = 1 if self.layout.has_region_axis else 0
        return {
            path: jax.ShapeDtypeStruct(x.shape[lead:], x.dtype)
            for path, x in arrays.items()
        }

    def _loss_of(
        self, loss_fn: LossFn | None, method: Method, params: PyTree
    ) -> Callable:
        """Return the loss as a function of the flat dict."""
        if not needs.wants_batch(method.needs):
            return _no_loss
        if loss_fn is None:
            raise ValueError(
                f"method={method.name!r} needs the gradient of the last batch: pass "
                "loss_fn="
            )

        def loss(arrays: Leaves, batch: PyTree, key: jax.Array) -> Any:
            return loss_fn(self.selection.put(params, arrays), batch, key)

        return loss


def _inputs_of_arrays(user_inputs: UserInputs) -> UserInputs:
    """Return the user's inputs as functions of the flat dict."""
    if user_inputs.second_moment is None:
        return user_inputs
    return dataclasses.replace(user_inputs, second_moment=lambda moment: moment)


def _form(arrays: Leaves, transport: Transport) -> str:
    """Return the form of `layout_of` in which a trainer has its regions."""
    if transport.exchange == "elastic":
        return "own"
    if jax.process_count() > 1:
        shardings = [getattr(x, "sharding", None) for x in arrays.values()]
        if all(x is None or x.is_fully_addressable for x in shardings):
            return "processes"
    return "stacked"


def _no_loss(params: PyTree, batch: PyTree, key: jax.Array) -> Any:
    raise AssertionError("a RegionSync takes no inner steps")


def _check_method(method: Method) -> None:
    """Refuse methods that need more of a trainer than its parameters."""
    reason = None
    if method.per_step is not None:
        reason = (
            "it exchanges messages at every step; use synchronized or RegionProgram"
        )
    elif method.sync is None:
        reason = "its regions exchange nothing; leave RegionSync out"
    elif method.sync.moments:
        reason = (
            "it averages the optimizer's moments; use synchronized or RegionProgram"
        )
    elif method.sync.robust:
        reason = "exclude_above and robust_mean restore regions; use RegionProgram"
    elif method.sync.schedule.is_measured:
        reason = "its schedule follows measured times; use numbers for delay_steps"
    elif getattr(method.sync.outer, "correct", None) is not None:
        reason = "it corrects every gradient; use synchronized or RegionProgram"

    if reason is not None:
        raise ValueError(
            f"method={method.name!r} cannot be used with RegionSync: {reason}"
        )
