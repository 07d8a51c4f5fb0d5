"""Save and restore the full state of a run, including fragments in flight.

Orbax saves arrays asynchronously: training continues once they are copied to the host.
Everything else (the schedule's state, bytes sent, and what the caller adds) is JSON in
the same checkpoint. Arrays without an entry, which Orbax cannot save, are restored from
their shapes. Orbax makes a checkpoint visible only when all of it is on disk, so
a killed process leaves a full checkpoint or none. Disks and copies can corrupt files
silently: each checkpoint has checksums, and `restore` takes the newest intact one. A
checkpoint holds its step and its run's identity, so a folder that was renamed, copied
or linked is recognised.
"""

import contextlib
import pathlib
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from cocodc_jax._extras import later
from cocodc_jax.buckets import is_in_bucket, open_file
from cocodc_jax.core.state import PyTree, TrainState
from cocodc_jax.engine import transfer
from cocodc_jax.engine.mesh import methods_in_own_context
from cocodc_jax.files import check_regular, write_whole
from cocodc_jax.program.region_program import RegionProgram
from cocodc_jax.train import checksums
from cocodc_jax.transforms.layers import named_leaves

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
else:
    ocp = later("orbax.checkpoint", "train")

_ITEMS = ("arrays", "rest")
# The keys of "rest" that checkpoints of all versions have.
_REST_KEYS = ("bytes_sent", "extra", "method", "schedule", "shapes")
# Holds the identity of the run whose checkpoints are beside it, random digits.
RUN_FILE = "run_id"


class CheckpointError(OSError):
    """A checkpoint could not be written, or none can be restored."""


class _DamagedError(Exception):
    """A checkpoint is corrupt, cannot be read, or is of another step or run."""


def steps_in(directory: Any) -> list[int]:
    """Return the steps of the checkpoints in a local folder or bucket."""
    # Orbax renames a checkpoint to its step once it is complete.
    names = (x.name for x in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(name) for name in names if name.isdecimal())


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Return False, as only the loop may ask: JAX counts the calls."""
        del step
        return False


@methods_in_own_context
class Checkpoints:
    """The checkpoints of one run, newest last; use as a context manager.

    Args:
      directory: a folder, or one of a bucket; made if missing.
      keep: how many of the newest to keep.
      cleans: whether to remove the remains of saves that were killed; no other process
        may save here then.
    """

    def __init__(
        self, directory: str | pathlib.Path, keep: int = 2, cleans: bool = False
    ):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1 checkpoint")

        self._in_bucket = is_in_bucket(directory)
        path: Any = directory if self._in_bucket else pathlib.Path(directory).absolute()
        path.mkdir(parents=True, exist_ok=True)
        if not self._in_bucket:
            check_regular(path)  # Orbax would wait for a pipe.
        finishing = ocp.AsyncOptions(post_finalization_callback=self._write_checksums)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, async_options=finishing, cleanup_tmp_directories=cleans
        )
        self._directory = path
        self._restored_run = ""
        self._manager = _Manager(path, item_names=_ITEMS, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Wait for a save in progress; raise if it failed."""
        with self._explained():
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, perhaps still being written; None if none."""
        return self._manager.latest_step()

    def save(
        self, program: RegionProgram, state: TrainState, extra: dict
    ) -> TrainState:
        """Start saving.

        Args:
          program: whose state it is.
          state: may be used (and donated) as soon as this returns.
          extra: JSON-able, returned by `restore`.

        Returns:
          The state, whose schedule has now read all observations.

        Raises:
          CheckpointError: if this save cannot be started, or the one before failed.
          ValueError: if the folder has a checkpoint of this step or a later one.
        """
        if self.latest_step is not None and self.latest_step >= state.step:
            raise ValueError(
                f"{self._directory} holds a checkpoint of step {self.latest_step}, so "
                f"step {state.step} cannot be saved; restore it, or use another folder"
            )

        state = program.synchronize(state)
        with self._explained():
            run = self._run_id()

        rest = {
            "step": state.step,
            "run": run,
            "method": program.method.name,
            "schedule": state.sync.schedule.to_json() if state.sync else None,
            "bytes_sent": state.bytes_sent,
            "shapes": _shapes(state),
            "extra": extra,
        }

        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_without_empty(_arrays(state))),
            rest=ocp.args.JsonSave(rest),
        )
        with self._explained():
            self._manager.save(state.step, args=items)

        return state

    def _run_id(self) -> str:
        """Return the run's identity, which process 0 stores at the first save."""
        if jax.process_index():
            return ""  # Process 0 saves it.
        file = self._directory / RUN_FILE
        if not file.exists():
            run = self._restored_run or secrets.token_hex(8)
            if self._in_bucket:
                file.write_text(run)
            else:
                write_whole(file, run)
        return _run_in(file)

    def _run_of(self, step: int, rest: dict) -> str:
        """Return the run's identity; raise `_DamagedError` for another step or run.

        Checkpoints of 0.38.0 and earlier have neither.
        """
        of_step = rest.get("step", step)
        run = rest.get("run", "")
        if of_step != step:
            raise _DamagedError(
                f"it holds step {of_step}: the folder was renamed, copied or linked"
            )

        file = self._directory / RUN_FILE
        expected_run = _run_in(file) if file.exists() else ""
        if run and expected_run and run != expected_run:
            raise _DamagedError(
                f"it is of another run ({run}, and {RUN_FILE} says {expected_run})"
            )

        return run

    def forget_after(self, step: int) -> None:
        """Delete the checkpoints after a step, which the run will reach again."""
        self.wait()
        for past in [s for s in self._manager.all_steps() if s > step]:
            self._manager.delete(past)

    def restore(
        self, program: RegionProgram, step: int | None = None
    ) -> tuple[TrainState, dict] | None:
        """Return the newest intact checkpoint and the `extra` saved with it.

        Newer ones that are corrupt, or of another step or run, are reported on standard
        error and moved aside, as the run will reach their steps again. Call it in every
        process.

        Args:
          program: of the same method, model and number of regions; another program can
            continue from its state by `RegionProgram.adopt`.
          step: of the only checkpoint to restore; None is the newest.

        Returns:
          None if there is no checkpoint at all.

        Raises:
          CheckpointError: if there are checkpoints, and all are corrupt.
          ValueError: if the checkpoint's arrays do not fit `program` (it names both
            methods if one cannot apply the other's fragments in flight), or if there is
            no checkpoint of `step`.
        """
        steps = sorted(self._manager.all_steps())
        if step is not None and step not in steps:
            raise ValueError(
                f"step={step} has no checkpoint in {self._directory}; there are "
                f"those of steps {', '.join(map(str, steps))}"
            )

        damaged: dict[int, str] = {}
        for candidate in reversed(steps if step is None else [step]):
            try:
                restored = self._restore(candidate, program)
            except _DamagedError as error:
                damaged[candidate] = str(error)
                continue

            if damaged:
                checksums.set_aside(self._directory, damaged, candidate)
                self._manager.reload()
            return restored

        if step is not None:
            where = f"the checkpoint of step {step} in {self._directory}"
            raise CheckpointError(f"{where} is damaged: {damaged[step]}")
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self._directory} are damaged: "
                f"{checksums.listed(damaged)}; bring one back from a copy, or delete "
                "them to begin anew"
            )

        return None

    def _restore(self, step: int, program: RegionProgram) -> tuple[TrainState, dict]:
        """Restore the checkpoint of a step, or raise `_DamagedError`."""
        why = checksums.damage_agreed(self._directory / str(step), _ITEMS)
        if why is not None:
            raise _DamagedError(why)

        only_rest = ocp.args.Composite(rest=ocp.args.JsonRestore())
        with self._reads_as_damage(step):
            rest: dict = self._manager.restore(step, args=only_rest)["rest"]
            for key in _REST_KEYS:
                _ = rest[key]  # A KeyError is damage.

        self._restored_run = self._run_of(step, rest)
        where = f"the checkpoint of step {step} in {self._directory}"
        abstract = _abstract(program, rest, where)
        shapes = _arrays(abstract)

        wanted = ocp.args.StandardRestore(_without_empty(shapes))
        only_arrays = ocp.args.Composite(arrays=wanted)
        with self._reads_as_damage(step):
            saved = self._manager.restore(step, args=only_arrays)["arrays"]
        arrays = _with_empty(saved, shapes)

        state = TrainState(
            region=arrays["region"],
            sync=abstract.sync and abstract.sync.with_arrays(arrays["sync"]),
            step=step,
            bytes_sent=rest["bytes_sent"],
            frozen=arrays.get("frozen", ()),
        )
        return state, rest["extra"]

    @contextlib.contextmanager
    def _reads_as_damage(self, step: int) -> Iterator[None]:
        """Treat Orbax's errors as corruption if there are no checksums.

        With several processes perhaps only one sees the error, and a bucket's may be
        temporary; in both cases all processes end.
        """
        try:
            yield
        except Exception as error:
            has_checksums = (self._directory / str(step) / checksums.FILE).exists()
            if has_checksums or self._in_bucket or jax.process_count() > 1:
                raise
            raise _DamagedError(f"it cannot be read: {first_line(error)}") from error

    def _write_checksums(self) -> None:
        """Write the checksums of a finished checkpoint before it becomes visible."""
        # Buckets have their own checksums, and no folders that are not visible yet.
        if jax.process_index() == 0 and not self._in_bucket:
            for folder in self._directory.glob("*.orbax-checkpoint-tmp"):
                checksums.write(folder)

    def wait(self) -> None:
        """Wait until the last save is on disk, or raise a `CheckpointError`."""
        with self._explained():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        # Orbax passes on any exception of the storage.
        try:
            yield
        except Exception as error:
            last = self.latest_step
            raise CheckpointError(
                f"a checkpoint could not be written to {self._directory}: {error}; "
                f"last good checkpoint: {'none' if last is None else f'step {last}'}"
            ) from error


def _run_in(file: Any) -> str:
    """Return the run that a `RUN_FILE` names."""
    with open_file(file) as opened:
        return opened.read().decode().strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _abstract(program: RegionProgram, rest: dict, where: str) -> TrainState:
    """Return the shapes of the program's state when the checkpoint was saved."""
    shapes = rest["shapes"]
    saved = rest["schedule"]
    schedule = program.method.schedule
    state = None

    difference = ""
    if schedule and saved:
        try:
            state = schedule.restore(saved)
        except (KeyError, TypeError):  # Another method's.
            difference = "what the schedule remembers is of another kind"

    saved_by = f"method={rest['method']!r}"
    restored_by = f"method={program.method.name!r}"
    # First with nothing in flight: another method may have other fragments.
    landed_schedule = schedule and schedule.landed(state or schedule.init())

    lasting = {k: v for k, v in shapes.items() if not k.startswith("in_flight/")}
    other_model = _differences(lasting, _shapes(program.abstract(landed_schedule)))
    if other_model:
        raise ValueError(
            f"{where} is of another model, method or number of regions (saved by "
            f"{saved_by}, restored into {restored_by}): {other_model}"
        )

    abstract = program.abstract(state)
    difference = difference or _differences(shapes, _shapes(abstract))
    if difference:
        raise ValueError(
            f"{where} was saved by {saved_by} in the middle of what {restored_by}, as "
            f"this program has it, cannot go on with: {difference}; restore it into "
            f"{saved_by} with the arguments that it was saved with"
        )
    return abstract


def _shapes(state: TrainState) -> dict[str, str]:
    """Return dtype and shape of every array, by path."""
    arrays = _arrays(state)
    sync = arrays.pop("sync")
    leaves = named_leaves(arrays | sync)
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _differences(saved: dict[str, str], current: dict[str, str]) -> str:
    """Describe the first difference and count the others; empty if there is none."""
    paths = sorted(saved.keys() | current.keys())
    wrong = [path for path in paths if saved.get(path) != current.get(path)]
    if not wrong:
        return ""

    path = wrong[0]
    saved_shape = saved.get(path, "missing")
    current_shape = current.get(path, "missing")
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{path} is {saved_shape} there and {current_shape} here{more}"


def _arrays(state: TrainState) -> dict[str, PyTree]:
    sync = state.sync.arrays if state.sync else {}
    frozen = {"frozen": state.frozen} if jax.tree.leaves(state.frozen) else {}
    return {"region": state.region, "sync": sync, **frozen}


def _without_empty(arrays: PyTree) -> PyTree:
    """Return a tree with an empty node in place of each array without an entry."""
    return jax.tree.map(lambda x: () if x.size == 0 else x, arrays)


def _with_empty(saved: PyTree, shapes: PyTree) -> PyTree:
    """Invert `_without_empty`: put the arrays that it removed back."""

    def one(shape: jax.ShapeDtypeStruct, value: Any) -> Any:
        if shape.size:
            return value
        return transfer.put(np.zeros(shape.shape, shape.dtype), shape.sharding)

    return jax.tree.map(one, shapes, saved)
