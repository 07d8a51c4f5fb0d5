"""Which devices take part together in a collective, as HLO writes it."""

from __future__ import annotations

import math
import re

import numpy as np


def replica_groups(attributes: str) -> np.ndarray | None:
    """Read which devices take part together, int `[groups, size]`.

    >>> replica_groups("replica_groups={{0,1},{2,3}}").tolist()
    [[0, 1], [2, 3]]
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)").tolist()
    [[0, 2], [1, 3]]
    >>> text = "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}"
    >>> replica_groups(text).tolist()
    [[0, 1], [2, 3]]

    Returns:
      None if all devices do, or nothing is said.
    """
    named = re.search(
        r"replica_groups=mesh\[([^]]*)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}:]*)\}",
        attributes,
    )
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        shape = [int(size) for size in sizes.values()]
        ids = np.arange(math.prod(shape)).reshape(_numbers(named[2] or "") or shape)
        ids = ids.transpose(_numbers(named[3])) if named[3] else ids
        together = re.findall(r"'(\w+)'", named[4])
        last = [list(sizes).index(name) for name in together]
        ids = np.moveaxis(ids.reshape(shape), last, range(-len(last), 0))
        return ids.reshape(-1, math.prod(int(sizes[name]) for name in together))
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if iota:
        shape, source, order = (_numbers(part or "") for part in iota.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return (ids.transpose(order) if order else ids).reshape(shape)
    found = re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}\s]*\})\}", attributes
    )
    if not found:
        return None
    groups = [_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", found[1])]
    return np.array(groups) if groups else None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
