"""Check that all processes have the same run; values are gathered as JSON text."""

from __future__ import annotations

import hashlib
import json
import pathlib
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import cocodc_jax as cc
from cocodc_jax.run.config import flat


def gather(value: Any) -> list[Any]:
    """Return every process's value, in the order of their ids; waits for all."""
    if jax.process_count() == 1:
        return [value]
    # Later collectives use all devices, including the outer mesh. Two concurrent ones
    # between the same devices could start in different orders in different processes.
    jax.block_until_ready(jax.live_arrays())
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.array(len(mine)))))
    padded = np.full(longest, ord(" "), np.uint8)
    padded[: len(mine)] = mine
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(np.asarray(row).tobytes()) for row in rows]


def check_alike(config: dict[str, Any]) -> None:
    """Compare this process's run with the others', before anything is compiled.

    Raises:
      ValueError: naming the processes and each difference.
    """
    mine = {
        "version": metadata.version("cocodc_jax"),
        "code": code_digest(),
        **flat(config),
    }
    everyone = gather(mine)
    found = []
    for process, theirs in enumerate(everyone):
        for name in sorted(everyone[0].keys() | theirs.keys()):
            first, here = everyone[0].get(name), theirs.get(name)
            if first != here:
                found.append(f"{name} is {first!r} in process 0, {here!r} in {process}")
    if found:
        raise ValueError(
            f"the processes do not run the same: {'; '.join(found)}; start all of them "
            "with the same command and the same code"
        )


def code_digest() -> str:
    """Return twelve hex digits that identify the version of this package's source."""
    root = pathlib.Path(cc.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
