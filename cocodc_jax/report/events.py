"""TensorBoard events of a run's records, for those who watch it live."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from cocodc_jax._extras import extra

with extra("report"):
    from tensorboardX import SummaryWriter


class EventWriter:
    """Mirrors records as scalars `kind/field`, with the step as abscissa."""

    def __init__(
        self, directory: str | os.PathLike[str], first_step: int | None = None
    ):
        """Open an event file.

        Args:
          directory: directory of the event files, made if missing.
          first_step: events of older files at this step and later are hidden by
            TensorBoard, since a resumed run writes them again; None hides none.
        """
        self._writer = SummaryWriter(
            os.fspath(directory), purge_step=first_step, flush_secs=10
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one scalar for each number of the record.

        Args:
          record: "kind", "step" and numbers, lists of numbers (one scalar a region),
            or None (no scalar); a "fragment" becomes part of the name.
        """
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each scalar of a record.

    >>> list(scalars({"kind": "train", "step": 3, "loss_regions": [2.0, 1.5]}))
    [('train/loss_regions/region_0', 2.0), ('train/loss_regions/region_1', 1.5)]
    """
    suffix = f"/fragment_{record['fragment']}" if "fragment" in record else ""
    for field, value in record.items():
        if field in ("kind", "step", "fragment") or value is None:
            continue
        name = f"{record['kind']}/{field}{suffix}"
        if isinstance(value, list):
            yield from ((f"{name}/region_{i}", one) for i, one in enumerate(value))
        else:
            yield name, value
