"""The leaves of a parameter tree that belong to experts, found by their paths.

A model of this package has them at `blocks/0/moe/experts/up` [E, ...], or stacked with
all layers at `blocks/moe/experts/up` [layers, E, ...]. Next to an expert's weights,
`experts/tokens` counts the tokens that it was given (`models.experts`).
"""

EXPERTS = "experts"
TOKENS = "tokens"
_BLOCKS = "blocks"
# A count is this many times the number of batches whose tokens an expert was given.
TOKEN_UNIT = 2.0**-20


def expert_axis(path: str) -> int | None:
    """Return the axis of a leaf that counts experts; None if it is not an expert's.

    >>> expert_axis("blocks/moe/experts/up"), expert_axis("blocks/0/moe/experts/up")
    (1, 0)
    >>> expert_axis("blocks/moe/router")
    """
    parts = path.split("/")
    if EXPERTS not in parts[:-1]:
        return None
    before = parts[: parts.index(EXPERTS)]
    if _BLOCKS not in before:
        return 0
    after = before[before.index(_BLOCKS) + 1 :]
    return int(not (after and after[0].isdecimal()))


def is_router(path: str) -> bool:
    """Return whether a leaf is of a router, which sends tokens to experts.

    Its name is `router`, or `gate` below a part whose name has `moe` in it.

    >>> is_router("blocks/moe/router"), is_router("layers/MoeBlock_0/gate/kernel")
    (True, True)
    >>> is_router("blocks/mlp/gate"), is_router("blocks/moe/experts/gate")
    (False, False)
    """
    parts = path.lower().split("/")
    if "router" in parts:
        return True
    if "gate" not in parts or EXPERTS in parts:
        return False
    above = parts[: parts.index("gate")]
    return any("moe" in part for part in above)


def is_token_count(path: str) -> bool:
    """Return whether a leaf counts the tokens of experts."""
    return path.split("/")[-2:] == [EXPERTS, TOKENS]


def count_of(path: str) -> str:
    """Return the path of the count that belongs to an expert's weight."""
    return "/".join((*path.split("/")[:-1], TOKENS))
