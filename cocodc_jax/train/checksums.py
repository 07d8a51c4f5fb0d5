"""Checksums of a checkpoint's files, and what happens to corrupt checkpoints.

Sizes and checksums are written into a checkpoint just before it becomes visible, so
every complete checkpoint has them. One without checksums is checked for missing parts.
"""

import functools
import hashlib
import json
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cocodc_jax.buckets import open_file

FILE = "checksums.json"

# Orbax writes it when the checkpoint becomes visible, after the checksums.
_LATER = "_CHECKPOINT_METADATA"
_DIGEST_BYTES = 16


def write(folder: pathlib.Path) -> None:
    """Write sizes and BLAKE2b digests of all files below a folder into it."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in (FILE, _LATER):
            digests[name] = [path.stat().st_size, _digest(path)]
    (folder / FILE).write_text(json.dumps({"blake2b": digests}, indent=1) + "\n")


def damage(folder: pathlib.Path, parts: tuple[str, ...]) -> str | None:
    """Describe the first corrupt file of a checkpoint; None if all are intact."""
    for part in parts:
        if not (folder / part).is_dir():
            return f"{part} is missing"

    if not (folder / FILE).exists():
        return None

    try:
        with open_file(folder / FILE) as file:
            noted: Any = json.load(file)["blake2b"]
        rows = [
            (name, int(size), str(digest)) for name, (size, digest) in noted.items()
        ]
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        return f"{FILE} cannot be read: {error!r}"

    for name, size, digest in rows:
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes of {size}"
            if _digest(path) != digest:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    return None


def damage_agreed(folder: pathlib.Path, parts: tuple[str, ...]) -> str | None:
    """Return process 0's `damage` in all processes; each must call it."""
    why = damage(folder, parts) if jax.process_index() == 0 else None
    if jax.process_count() > 1:
        is_damaged = multihost_utils.broadcast_one_to_all(np.array(why is not None))
        if is_damaged and why is None:
            why = "process 0 says how"
    return why


def set_aside(
    directory: pathlib.Path, damaged: Mapping[int, str], restored: int
) -> None:
    """Move corrupt checkpoints out of the way of later ones, and report it."""
    if jax.process_index() == 0:
        names = {step: f"damaged_{step}" for step in damaged}
        for step, name in names.items():
            new: Any = directory / name
            if isinstance(new, pathlib.Path):
                if new.is_symlink():
                    new.unlink()
                shutil.rmtree(new, ignore_errors=True)
            elif new.exists():  # In a bucket.
                new.rmtree(missing_ok=True)

            (directory / str(step)).rename(new)

        print(
            f"warning: damaged in {directory}: {listed(damaged)}; moved to "
            f"{', '.join(names.values())}, and step {restored} is restored instead",
            file=sys.stderr,
        )

    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("damaged checkpoints are set aside")


def listed(damaged: Mapping[int, str]) -> str:
    """Describe every corrupt step."""
    return "; ".join(f"step {step}: {why}" for step, why in damaged.items())


def _digest(path: pathlib.Path) -> str:
    blake2b = functools.partial(hashlib.blake2b, digest_size=_DIGEST_BYTES)
    with open_file(path) as file:
        content: Any = file  # It can be read into a buffer.
        return hashlib.file_digest(content, blake2b).hexdigest()
