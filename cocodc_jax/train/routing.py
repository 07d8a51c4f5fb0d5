"""Records of a mixture of experts: loads, balance, and how regions differ.

With f^m_le the share of its tokens that region m gave to expert e of layer l in the
step of the record, k experts a token and E experts,

    load_max    mean over layers of  max_e E / k mean_m f^m_le     1 if all get the same
    divergence  mean over layers and regions of
                1 / (2 k) sum_e |f^m_le - mean_m f^m_le|           0 if regions agree
    dead        experts, of all layers, that no region gave a token

Loads of single experts are written where there are few.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# Numbers of one region's load that are written one by one, at most.
MOST_LOADS = 256
_AUX = ("router_balance", "router_z", "router_entropy", "expert_load")


def routing_of(aux: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a loss reports of its routers, by name; empty if it has none."""
    return {name: aux[name] for name in _AUX if "expert_load" in aux}


def record_of(step: int, routing: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the record of a step."""
    load_RNE = np.asarray(routing["expert_load"], np.float64)
    per_token = load_RNE[0, 0].sum()
    mean_NE = load_RNE.mean(axis=0)
    numbers = {
        "balance": routing["router_balance"].mean(dtype=np.float64),
        "z": routing["router_z"].mean(dtype=np.float64),
        "entropy": routing["router_entropy"].mean(dtype=np.float64),
        "load_max": mean_NE.max(axis=1).mean() * mean_NE.shape[1] / per_token,
        "divergence": np.abs(load_RNE - mean_NE).sum(axis=2).mean() / (2 * per_token),
        "dead": int((mean_NE == 0).sum()),
    }
    record = {"kind": "experts", "step": step} | {
        n: float(x) for n, x in numbers.items()
    }
    if mean_NE.size <= MOST_LOADS:
        record["load_regions"] = load_RNE.tolist()
    return record
