"""A run's folder: its lock, the changes that a resumed run may have, its position.

`changes.jsonl` has a line for each time that a run was resumed with changes.
"""

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import jax
import numpy as np

from cocodc_jax.fields import Kind
from cocodc_jax.files import (
    append_line,
    ensure_folder,
    open_regular,
    read_regular,
    read_table,
    write_whole,
    writing,
)
from cocodc_jax.report.records import (
    METRICS_FILE,
    MetricsWriter,
    OpenMirror,
    bytes_until,
    tensorboard,
)
from cocodc_jax.run.config.train_config import TrainConfig, dumps, kind_of
from cocodc_jax.train.checkpoint import steps_in

CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
CHANGES_FILE = "changes.jsonl"
LOCK_FILE = ".lock"
STARTING_FILE = ".starting"
_LOOK_S = 0.1
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# The parts of a clock that a new process takes from another's.
CLOCK = ("seconds", "began_step", "began_s")

# Values of both configurations, by the name of a field.
Changes = Mapping[str, tuple[Any, Any]]

# Ends of the error "for NAMES give VALUES" about a change that is refused.
_OR_ELSE = {
    Kind.COMPUTED: " as before, or train in another workdir with --adopt_from={}, "
    "which goes on from the last checkpoint",
    Kind.MODEL: " as before, or begin in another workdir: it makes another model",
    Kind.BEGINNING: ", which the run began with",
}


class ResumeError(Exception):
    """The newest checkpoint, or the folder, does not belong to this run."""


class FolderInUseError(OSError):
    """Another process writes to the folder."""


@contextlib.contextmanager
def only_writer(folder: pathlib.Path) -> Iterator[None]:
    """Lock a process's own folder of a run against other processes.

    The lock is the kernel's (`flock`), so it ends with the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_regular(folder / LOCK_FILE, "a+b") as file:
        try:
            _lock(file)
        except BlockingIOError as error:
            file.seek(0)
            owner = _owner(file)
            raise FolderInUseError(
                f"workdir={str(folder)!r} is in use by {owner}; two runs cannot write "
                "one folder: wait for that one, end it, or name another folder"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(
                f"warning: the file system of {folder} has no locks "
                f"({error.strerror}); see that no other run writes there",
                file=sys.stderr,
            )

        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        file.flush()
        yield


def _lock(file: IO[bytes]) -> None:
    """Lock a file for writing; raises `BlockingIOError` if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # `owner_of` elsewhere holds it for an instant.
        time.sleep(_LOOK_S)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def starting(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Mark a process's own folder until it trains; yield a function that unmarks it.

    A resumed run has records of its earlier part, so these do not show whether it still
    compiles.
    """
    mark = folder / STARTING_FILE
    with writing(mark):
        mark.touch()
    try:
        yield lambda: mark.unlink(missing_ok=True)
    finally:
        mark.unlink(missing_ok=True)


def is_starting(folder: pathlib.Path) -> bool:
    """Return whether the process that writes to a folder has not trained yet."""
    return (folder / STARTING_FILE).exists() and owner_of(folder) is not None


def owner_of(folder: pathlib.Path) -> str | None:
    """Return which process writes to a folder now; None if none does."""
    # There may be no lock, or a file system without.
    with contextlib.suppress(OSError), open_regular(folder / LOCK_FILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _owner(file)
    return None


def _owner(file: IO[bytes]) -> str:
    """Return what a lock's file says of the process that holds it."""
    return file.read().decode(errors="replace").strip() or "another process"


def check_folder(workdir: pathlib.Path) -> None:
    """Refuse a workdir that is a file, or in a bucket."""
    if workdir.parts[:1] == ("gs:",):  # A `Path` has one of the two slashes.
        raise ValueError(
            f"workdir='gs://{pathlib.PurePath(*workdir.parts[1:])}' is in a bucket, "
            "which this program does not write to; name a folder of this machine"
        )
    try:
        is_file = workdir.exists() and not workdir.is_dir()
        if not is_file:  # Fails if the folder cannot be searched.
            (workdir / CONFIG_FILE).exists()
    except OSError as error:
        raise unwritable(workdir, error) from error
    if is_file:
        raise ValueError(f"workdir={str(workdir)!r} is a file; name a folder")


def make_folder(workdir: pathlib.Path) -> None:
    """Make the folder of a program's results, before the work that fills it."""
    check_folder(workdir)
    try:
        ensure_folder(workdir)
    except OSError as error:
        raise unwritable(workdir, error) from error


def unwritable(workdir: pathlib.Path, error: OSError) -> ValueError:
    """Return the message for a workdir that cannot be written to."""
    return ValueError(
        f"workdir={str(workdir)!r} cannot be written to ({error.strerror}); make "
        "room, change its permissions, or name another folder"
    )


def check_workdir(
    config: TrainConfig, workdir: pathlib.Path, checkpoints: Any = None
) -> TrainConfig | None:
    """Refuse a folder that holds anything but this run; return the stored config."""
    check_folder(workdir)
    here = workdir / CHECKPOINTS
    if here.exists() and not here.is_dir():
        raise ValueError(
            f"workdir={str(workdir)!r} has a file named {CHECKPOINTS}, where the "
            "folder of the checkpoints goes; move it, or name another folder"
        )

    path = workdir / CONFIG_FILE
    if not path.exists():
        return None
    try:
        first = TrainConfig.from_json(read_table(path))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"workdir={str(workdir)!r} holds a {CONFIG_FILE} that cannot be read "
            f"({error}); bring it back from a copy, delete it if the folder holds this "
            "very run, or name another folder"
        ) from error

    # Arguments that are newer than the file take their defaults in both.
    first = first.resolve()
    done = max(steps_in(checkpoints or here), default=0)
    _check_changes(first, config, workdir, done)
    return first


def _check_changes(
    first: TrainConfig, config: TrainConfig, workdir: pathlib.Path, done: int
) -> None:
    """Raise ValueError for changes with which a run cannot be resumed.

    Args:
      first: the configuration that the run began with.
      config: the one with which it is resumed.
      workdir: its folder.
      done: step of its newest checkpoint.
    """
    changes = first.changes(config)
    repairs = []
    for kind, or_else in _OR_ELSE.items():
        names = [name for name in changes if kind_of(name) is kind]
        if not names:
            continue
        if kind is Kind.COMPUTED and config.run.exchange == "elastic":
            or_else = " as before, or begin in another workdir"  # No run adopts it.
        before = " ".join(
            f"--{name}={changes[name][0]}"
            for name in names
            if changes[name][0] is not None
        )
        repairs.append(f"for {', '.join(names)} give {before}{or_else.format(workdir)}")

    if any(kind_of(name) is Kind.LENGTH for name in changes):
        if config.run.steps < done:
            repairs.append(f"for steps give {done} or more, as so many are done")
        elif config.optimizer.follows_length and not config.run.change_schedule:
            repairs.append(
                "for steps add --change_schedule, as the learning rate follows their "
                "number and becomes that of the new length"
            )

    if repairs:
        raise ValueError(
            f"workdir={str(workdir)!r} holds a run of another configuration "
            f"({first.differences(config)}): {'; '.join(repairs)}"
        )


def check_exchange(folder: Any, is_elastic: bool) -> None:
    """Refuse elastic regions for a run that began without them, and vice versa."""
    check_folder(folder)
    run = folder.parent if is_elastic else folder
    other = run if is_elastic else run / "region_0"
    if (folder / CONFIG_FILE).exists() or not (other / CONFIG_FILE).exists():
        return

    before = "regions that are one job" if is_elastic else "elastic regions"
    now = "elastic regions" if is_elastic else "regions that are one job"
    repair = "leave out" if is_elastic else "use"
    raise ValueError(
        f"workdir={str(run)!r} holds a run of {before}, whose checkpoints {now} cannot "
        f"go on from; {repair} exchange='elastic', or name another folder"
    )


def claim(config: TrainConfig, workdir: pathlib.Path, checkpoints: Any = None) -> None:
    """Write a run's configuration to its folder, unless another run uses it."""
    try:
        with only_writer(workdir):
            write_config(config, workdir, checkpoints)
    except FolderInUseError:
        return
    except OSError as error:
        raise unwritable(workdir, error) from error


def write_config(
    config: TrainConfig, workdir: pathlib.Path, checkpoints: Any = None
) -> TrainConfig:
    """Write a run's configuration to its folder, unless it is there already."""
    first = check_workdir(config, workdir, checkpoints)
    path = workdir / CONFIG_FILE
    text = dumps(config.to_json())
    is_written = path.exists() and read_regular(path) == text.encode()
    if first in (None, config) and not is_written:
        write_whole(path, text)
    return first or config


def go_on(config: TrainConfig, workdir: pathlib.Path, step: int) -> None:
    """Record and print what has changed when a run is resumed at a step."""
    path = workdir / CONFIG_FILE
    before = TrainConfig.from_json(read_table(path)).resolve()
    if before == config:
        return

    changes = before.changes(config)
    lists = {name: list(values) for name, values in changes.items()}  # As in JSON.
    append_line(workdir / CHANGES_FILE, {"step": step, "changes": lists})
    print(f"goes on from step {step} with {listed(changes)}", file=sys.stderr)
    if "steps" in changes and config.optimizer.follows_length:
        print(
            f"  the learning rate of its next step is {_learning_rate(config, step)}, "
            f"not {_learning_rate(before, step, config)}",
            file=sys.stderr,
        )
    write_whole(path, dumps(config.to_json()))


def _learning_rate(
    config: TrainConfig, step: int, of_method: TrainConfig | None = None
) -> str:
    """Return the learning rate of a run at a step, as text."""
    method = (of_method or config).method.build()
    schedule = config.optimizer.learning_rate(config.run.steps, method)
    return f"{np.asarray(schedule(step)):.3g}"


def listed(changes: Changes) -> str:
    """Describe changes of a configuration."""
    texts = (f"{name}={new} (was {old})" for name, (old, new) in changes.items())
    return ", ".join(texts)


def finished_summary(path: pathlib.Path, steps: int) -> dict[str, Any] | None:
    """Return the summary of a run that ended at `steps`; None if it has not."""
    if not path.exists():
        return None
    try:
        summary = read_table(path)
        if "steps" not in summary:
            raise ValueError(f"{path} is damaged: it holds no summary")
    except ValueError as error:
        print(
            f"warning: {error}; it is made again from the last checkpoint",
            file=sys.stderr,
        )
        return None
    return summary if summary["steps"] == steps else None  # Of another length.


def open_records(
    folder: pathlib.Path,
    position: Mapping[str, Any],
    step: int,
    mirrors: Sequence[OpenMirror] = (tensorboard,),
) -> MetricsWriter:
    """Open the files of records at the position and step where a process resumes."""
    try:
        offset = position.get("metrics_bytes")
        if offset is None and step:
            offset = bytes_until(folder / METRICS_FILE, step)
        return MetricsWriter(folder, offset, mirrors)
    except ValueError as error:
        raise ResumeError(
            f"the run in {folder} cannot go on: {error}; bring the file back from a "
            "copy, or name another workdir"
        ) from error


def position(saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return where this process resumes, in its own files and in its regions' data.

    Its files are those of the process with the same id in the checkpoint, if any.

    Args:
      saved: what each process added to the checkpoint.
    """
    process = jax.process_index()
    if process < len(saved):
        of_files = saved[process]
    else:
        of_files = {name: saved[0][name] for name in CLOCK if name in saved[0]}

    regions: dict[str, Any] = {}
    for of_process in saved:
        regions |= of_process["stream"]["regions"]
    return {**of_files, "stream": {**saved[0]["stream"], "regions": regions}}


def progress(
    saved: Sequence[Mapping[str, Any]], regions: Sequence[int]
) -> dict[str, Any]:
    """Return this process's sums of the records, with the losses of its regions.

    Args:
      saved: what each process added to the checkpoint.
      regions: that this process trains now.
    """
    is_same_count = len(saved) == jax.process_count()
    process = jax.process_index() if is_same_count else 0
    sums_here = saved[process]["progress"]

    # Of each region: the sums of its process, and its row in them.
    rows = {
        region: (of_process["progress"], row)
        for of_process in saved
        for row, region in enumerate(of_process["stream"]["regions"])
    }
    of_regions = [rows[str(region)] for region in regions]

    losses = [[step[row] for step in sums["window"]] for sums, row in of_regions]
    result = {**sums_here, "window": list(np.array(losses).T)}
    if sums_here.get("spikes"):
        result["spikes"] = {
            name: [
                past
                for sums, row in of_regions
                for past in sums["spikes"][name][row : row + 1]
            ]
            for name in sums_here["spikes"]
        }
    return result
