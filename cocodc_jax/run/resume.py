"""A run's folder: who writes there, what may have changed, where the run stopped.

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
from typing import Any

import jax
import numpy as np

from cocodc_jax.fields import Kind
from cocodc_jax.files import (
    append_line,
    ensure_folder,
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
from cocodc_jax.run.config import TrainConfig, dumps, kind_of
from cocodc_jax.train.checkpoint import steps_in

CONFIG_FILE, CHECKPOINTS = "config.json", "checkpoints"
CHANGES_FILE, LOCK_FILE = "changes.jsonl", ".lock"
STARTING_FILE = ".starting"
_LOOK_S = 0.1
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

# What a process that is new takes of another's clock.
CLOCK = "seconds", "began_step", "began_s"

Changes = Mapping[str, tuple[Any, Any]]

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
    with (folder / LOCK_FILE).open("a+") as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # `owner_of` elsewhere holds it for an instant.
                time.sleep(_LOOK_S)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read().strip() or "another process"
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
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def starting(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Mark a process's own folder until it trains; yields what takes the mark away.

    A run that goes on has records of its earlier life, so these do not show whether it
    still compiles.
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
    """Return which process writes to a folder now, None if none does."""
    # There may be no lock, or a file system without.
    with contextlib.suppress(OSError), (folder / LOCK_FILE).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return None


def check_folder(workdir: pathlib.Path) -> None:
    """Refuse a workdir that is a file, or in a bucket."""
    if workdir.parts[:1] == ("gs:",):  # A `Path` has one of the two slashes.
        raise ValueError(
            f"workdir='gs://{pathlib.PurePath(*workdir.parts[1:])}' is in a bucket, "
            "which this program does not write to; name a folder of this machine"
        )
    try:  # The second is of a closed folder.
        is_file = workdir.exists() and not (workdir / CONFIG_FILE).exists()
        is_file = is_file and not workdir.is_dir()
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
    """Refuse a folder that holds anything but this run; return the run's own config."""
    path, saved = workdir / CONFIG_FILE, workdir / CHECKPOINTS
    check_folder(workdir)
    if saved.exists() and not saved.is_dir():
        raise ValueError(
            f"workdir={str(workdir)!r} has a file named {CHECKPOINTS}, where the "
            "folder of the checkpoints goes; move it, or name another folder"
        )
    if not path.exists():
        return None
    try:
        found = TrainConfig.from_json(read_table(path))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"workdir={str(workdir)!r} holds a {CONFIG_FILE} that cannot be read "
            f"({error}); bring it back from a copy, delete it if the folder holds this "
            "very run, or name another folder"
        ) from error
    # Arguments that are newer than the file take their defaults there too.
    found = found.resolve()
    _check_changes(
        found, config, workdir, max(steps_in(checkpoints or saved), default=0)
    )
    return found


def _check_changes(
    found: TrainConfig, config: TrainConfig, workdir: pathlib.Path, done: int
) -> None:
    """Refuse changes that a run that has begun cannot be resumed with."""
    changes = found.changes(config)
    names = {kind: [n for n in changes if kind_of(n) is kind] for kind in Kind}
    told = []
    for kind, other in _OR_ELSE.items():
        if kind is Kind.COMPUTED and config.run.exchange == "elastic":
            other = " as before, or begin in another workdir"  # No run adopts it.
        if names[kind]:
            pairs = ((n, changes[n][0]) for n in names[kind])
            before = " ".join(f"--{n}={x}" for n, x in pairs if x is not None)
            told.append(
                f"for {', '.join(names[kind])} give {before}{other.format(workdir)}"
            )
    if names[Kind.LENGTH]:
        if config.run.steps < done:
            told.append(f"for steps give {done} or more, as so many are done")
        elif config.optimizer.follows_length and not config.run.change_schedule:
            told.append(
                "for steps add --change_schedule, as the learning rate follows their "
                "number and becomes that of the new length"
            )
    if told:
        raise ValueError(
            f"workdir={str(workdir)!r} holds a run of another configuration "
            f"({found.differences(config)}): {'; '.join(told)}"
        )


def check_exchange(folder: Any, is_elastic: bool) -> None:
    """Refuse a run whose regions were not elastic if they are now, and vice versa."""
    check_folder(folder)
    other = folder.parent if is_elastic else folder / "region_0"
    if (folder / CONFIG_FILE).exists() or not (other / CONFIG_FILE).exists():
        return
    one, elastic = "regions that are one job", "elastic regions"
    there, here = (one, elastic) if is_elastic else (elastic, one)
    raise ValueError(
        f"workdir={str(folder.parent if is_elastic else folder)!r} holds a run of "
        f"{there}, whose checkpoints {here} cannot go on from; "
        f"{'leave out' if is_elastic else 'use'} exchange='elastic', or name another "
        "folder"
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
    found = check_workdir(config, workdir, checkpoints)
    path, text = workdir / CONFIG_FILE, dumps(config.to_json())
    if found in (None, config) and (not path.exists() or path.read_text() != text):
        write_whole(path, text)
    return found or config


def go_on(config: TrainConfig, workdir: pathlib.Path, step: int) -> None:
    """Record and print what has changed when a run is resumed at a step."""
    path = workdir / CONFIG_FILE
    found = TrainConfig.from_json(read_table(path)).resolve()
    if found == config:
        return
    changes = found.changes(config)
    line = {"step": step, "changes": {n: list(pair) for n, pair in changes.items()}}
    append_line(workdir / CHANGES_FILE, line)
    print(f"goes on from step {step} with {listed(changes)}", file=sys.stderr)
    if "steps" in changes and config.optimizer.follows_length:
        method = config.method.build()
        before, after = (
            np.asarray(each.optimizer.learning_rate(each.run.steps, method)(step))
            for each in (found, config)
        )
        print(
            f"  the learning rate of its next step is {after:.3g}, not {before:.3g}",
            file=sys.stderr,
        )
    write_whole(path, dumps(config.to_json()))


def listed(changes: Changes) -> str:
    """Describe changes of a configuration."""
    return ", ".join(f"{name}={b} (was {a})" for name, (a, b) in changes.items())


def finished_summary(path: pathlib.Path, steps: int) -> dict[str, Any] | None:
    """Return the summary of a run that ended after so many steps, None without."""
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
    found: dict,
    step: int,
    mirrors: Sequence[OpenMirror] = (tensorboard,),
) -> MetricsWriter:
    """Open the files of records where a process resumes."""
    try:
        offset = found.get("metrics_bytes")
        if offset is None and step:
            offset = bytes_until(folder / METRICS_FILE, step)
        return MetricsWriter(folder, offset, mirrors)
    except ValueError as error:
        raise ResumeError(
            f"the run in {folder} cannot go on: {error}; bring the file back from a "
            "copy, or name another workdir"
        ) from error


def position(saved: list[dict]) -> dict:
    """Return where this process resumes, in its own files and in its regions' data.

    Its files are those of the process that had its id when the run was saved, if any.
    """
    process = jax.process_index()
    clock = {name: saved[0][name] for name in CLOCK if name in saved[0]}
    own = saved[process] if process < len(saved) else clock
    regions: dict = {}
    for each in saved:
        regions |= each["stream"]["regions"]
    stream = {**saved[0]["stream"], "regions": regions}
    return {**own, "stream": stream}


def progress(saved: list[dict], regions: Sequence[int]) -> dict:
    """Return the records' sums of this process, with losses of its regions."""
    process = jax.process_index()
    own = saved[process] if len(saved) == jax.process_count() else saved[0]
    of = {
        region: (i, each["progress"])
        for each in saved
        for i, region in enumerate(each["stream"]["regions"])
    }
    each = [of[str(region)] for region in regions]
    losses = [[row[i] for row in found["window"]] for i, found in each]
    past = {
        name: [x for i, found in each for x in found["spikes"][name][i : i + 1]]
        for name in own["progress"].get("spikes", ())
    }
    spikes = {"spikes": past} if past else {}
    return {**own["progress"], "window": list(np.array(losses).T), **spikes}
