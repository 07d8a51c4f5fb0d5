"""Reads the files that flags name, such as loss curves, and writes results."""

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import TypeVar

from cocodc_jax.files import write_whole
from cocodc_jax.report.records import read_records

Value = TypeVar("Value")


def named(flag: str, path: str, read: Callable[[str], Value]) -> Value:
    """Return read(path); file system errors name the flag."""
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"--{flag}={path}: {error.strerror}") from error


def write_json(path: pathlib.Path, value: dict) -> None:
    """Write a table as readable JSON."""
    write_whole(path, json.dumps(value, indent=1))


def read_curve(
    path: str | pathlib.Path, key: str = "eval_loss"
) -> list[tuple[float, float]]:
    """Read (step, loss) pairs from JSON lines or from a JSON list of pairs."""
    text = pathlib.Path(path).read_bytes()
    try:
        if text.lstrip().startswith(b"["):
            pairs = json.loads(text)
        else:
            rows = read_records(path)
            pairs = [(row["step"], row[key]) for row in rows if key in row]
        curve = [(float(step), float(loss)) for step, loss in pairs]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a loss curve: {error!r}") from error
    if not curve:
        raise ValueError(f"{path} has no line with both 'step' and {key!r}")
    steps = [step for step, _ in curve]
    if any(later <= step for step, later in itertools.pairwise(steps)):
        raise ValueError(f"{path}: loss curve steps must increase, got {steps}")
    return curve
