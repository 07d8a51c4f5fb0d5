"""Figures of the tests of trainers, for the table of `docs/start/trainers.md`.

    COCODC_TRAINERS_RESULTS=experiments/results/trainers.json pytest -m trainers ...

writes what the tests compare; without the variable they only print it.
"""

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "COCODC_TRAINERS_RESULTS"


def record(trainer: str, **values: Any) -> None:
    """Print figures of a trainer, and write them to the file of the variable."""
    print(f"{trainer}: {values}")
    if not (name := os.environ.get(VARIABLE)):
        return
    path = Path(name)
    every = json.loads(path.read_text()) if path.exists() else {}
    every[trainer] = every.get(trainer, {}) | values
    path.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")


def learning(fact: dict[str, Any], plain_bytes: int) -> dict[str, float]:
    """Return the figures of a method that learns: its losses, and the bytes it sends.

    Args:
      fact: of its run, with `losses` and `bytes_sent`.
      plain_bytes: that streaming sends in float32.
    """
    return {
        "first_loss": fact["losses"][0],
        "last_loss": fact["losses"][-1],
        "share_of_bytes": fact["bytes_sent"] / plain_bytes,
    }
