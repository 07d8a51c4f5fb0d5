"""Records of a run: one every `log_every` steps, per sync, and per evaluation.

They have no times. Losses are nats per token, and `bytes_sent_per_region` are the bytes
that one region has sent by that step.
"""

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cocodc_jax.core.state import AppliedSync
from cocodc_jax.engine import transfer
from cocodc_jax.sync.robust import RESTORED, reasons_of
from cocodc_jax.train.spikes import Spike, Spikes

Record = dict[str, Any]


class Records:
    """Makes the records, and keeps the sums behind them."""

    def __init__(
        self,
        write: Callable[[Record], None],
        log_every: int,
        tokens_at: Callable[[int], int],
        spikes: Spikes | None = None,
    ):
        self._write = write
        self._log_every = log_every
        self._tokens_at = tokens_at
        self._spikes = spikes
        self.spikes: list[Spike] = []
        self._window: list[np.ndarray] = []
        self._ratios: list[float] = []
        self.left_out: collections.Counter[str] = collections.Counter()
        self.last_eval: Record | None = None

    @property
    def correction_ratio(self) -> float | None:
        """Mean over all syncs; None without compensation."""
        return float(np.mean(self._ratios)) if self._ratios else None

    def progress(self) -> dict:
        """Return the sums, for a checkpoint; plain values."""
        spikes = {"spikes": self._spikes.to_json()} if self._spikes else {}
        return spikes | {
            "window": [x.tolist() for x in self._window],
            "ratios": self._ratios,
            "last_eval": self.last_eval,
            "left_out": self.left_out,
        }

    def continue_from(self, progress: dict) -> None:
        """Restore the sums that `progress` returned."""
        self._window = [np.array(x, np.float32) for x in progress["window"]]
        self._ratios = list(progress["ratios"])
        self.last_eval = progress["last_eval"]
        self.left_out = collections.Counter(progress["left_out"])
        if self._spikes:
            self._spikes.continue_from(progress["spikes"])

    def step(
        self,
        step: int,
        loss: np.ndarray,
        bytes_sent: int,
        first_region: int,
        aux: Mapping[str, np.ndarray],
    ) -> None:
        """Add one step, with `recorded_of` it, and write a record if it is due."""
        if self._spikes:
            spikes = self._spikes.observe(step, loss, first_region)
            self.spikes += spikes
            for spike in spikes:
                self._write({"kind": "spike", **spike._asdict()})

        self._window.append(loss)
        if step % self._log_every:
            return

        window = np.stack(self._window)
        self._window = []
        regions = np.asarray(np.mean(window, axis=0, dtype=np.float64))
        if not np.isfinite(regions).all():
            regions = np.array([finite_mean(x, np.float64) for x in window.T])

        record = {
            "kind": "train",
            "step": step,
            "tokens": self._tokens_at(step),
            "loss": finite_or_none(finite_mean(regions)),
            "loss_regions": [finite_or_none(x) for x in regions],
            "bytes_sent_per_region": bytes_sent,
        }

        if "stage_bytes" in aux:
            record["stage_bytes"] = float(aux["stage_bytes"].mean(dtype=np.float64))
        self._write(record)
        if "expert_load" in aux:
            self._write(record_of(step, aux))

    def sync(self, sync: AppliedSync) -> None:
        """Write the record of an applied sync; waits for its numbers."""
        metrics = {name: _mean_of_regions(x) for name, x in sync.metrics.items()}
        ratio = metrics.pop("correction_ratio", None)
        if ratio is not None:
            self._ratios.append(ratio)

        record = {
            "kind": "sync",
            "step": sync.apply_step,
            "fragment": sync.fragment_id,
            "start_step": sync.start_step,
            "apply_step": sync.apply_step,
            "bytes": sync.num_bytes,
            "pseudo_gradient_norm": float(sync.norm),
            "correction_ratio": ratio,
        }
        for name, value in metrics.items():
            record[f"merge_{name}"] = value

        if sync.verdict is not None:
            verdict = np.asarray(sync.verdict)
            record["left_out"] = (verdict % RESTORED).tolist()
            for m, reason in reasons_of(verdict).items():
                self.left_out[f"region {m}: {reason}"] += 1

        self._write(record)

    def evaluation(
        self, step: int, bytes_sent: int, loss: float, loss_outer: float, drift: float
    ) -> None:
        """Write the record of an evaluation: of the mean and of the outer model."""
        self.last_eval = {
            "kind": "eval",
            "step": step,
            "tokens": self._tokens_at(step),
            "bytes_sent_per_region": bytes_sent,
            "eval_loss": loss,
            "eval_perplexity": math.exp(min(loss, 700.0)),
            "eval_loss_outer": loss_outer,
            "region_drift": drift,
        }
        self._write(self.last_eval)


def _mean_of_regions(values: Any) -> float | None:
    """Return the mean over the regions of this process; None if none has a number.

    A region that becomes NaN after it has sent a finite message has none.
    """
    return finite_or_none(finite_mean(transfer.local_rows(values), np.float64))


def finite_mean(values: np.ndarray, dtype: Any = None) -> Any:
    """Return the mean of the finite values, NaN if there are none."""
    finite = values[np.isfinite(values)]
    return np.mean(finite, dtype=dtype) if len(finite) else np.float64(np.nan)


def finite_or_none(value: Any) -> float | None:
    """Return a JSON number: None if it is not finite."""
    return float(value) if np.isfinite(value) else None


# The most numbers of one region's load that are written one by one.
_MOST_LOADS = 256
_ROUTING = ("router_balance", "router_z", "router_entropy", "expert_load")


def recorded_of(aux: Mapping[str, Any]) -> dict[str, Any]:
    """Return what records keep of a loss's aux: bytes between stages, and routing."""
    names = ["stage_bytes"]
    if "expert_load" in aux:
        names += _ROUTING
    return {name: aux[name] for name in names if name in aux}


def record_of(step: int, routing: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the record of a mixture of experts: loads, balance, regional differences.

    With f^m_le the share of its tokens that region m gave to expert e of layer l in the
    step of the record, k experts a token and E experts,

        load_max    mean over layers of  max_e E / k mean_m f^m_le    1 if all are equal
        divergence  mean over layers and regions of
                    1 / (2 k) sum_e |f^m_le - mean_m f^m_le|          0 if regions agree
        dead        experts, of all layers, that no region gave a token

    The loads of single experts are written if there are few.
    """
    load_RNE = np.asarray(routing["expert_load"], np.float64)
    per_token = load_RNE[0, 0].sum()
    mean_NE = load_RNE.mean(axis=0)
    numbers = {
        "balance": finite_mean(routing["router_balance"], np.float64),
        "z": finite_mean(routing["router_z"], np.float64),
        "entropy": finite_mean(routing["router_entropy"], np.float64),
        "load_max": mean_NE.max(axis=1).mean() * mean_NE.shape[1] / per_token,
        "divergence": np.abs(load_RNE - mean_NE).sum(axis=2).mean() / (2 * per_token),
        "dead": (mean_NE == 0).sum(),
    }

    record: Record = {"kind": "experts", "step": step}
    record |= {name: finite_or_none(x) for name, x in numbers.items()}
    if mean_NE.size <= _MOST_LOADS:
        record["load_regions"] = load_RNE.tolist()
    return record
