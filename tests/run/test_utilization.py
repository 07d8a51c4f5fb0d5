"""MFU: operations per token by hand, over peaks by kind of device."""

import io
import json
import types

import pytest
from rich.console import Console

from cocodc_jax.chips import peak_tokens_per_second
from cocodc_jax.models import TransformerConfig, flops_per_token, num_params
from cocodc_jax.report.progress import RunProgress
from cocodc_jax.report.records import MetricsWriter
from cocodc_jax.run.attend import Watch
from cocodc_jax.train.hooks import Clock

MODEL = TransformerConfig(
    vocab_size=96, num_layers=2, width=32, num_heads=2, mlp_width=64, num_kv_heads=2
)
PER_TOKEN = flops_per_token(MODEL, 16)


def devices(*kinds):
    return [types.SimpleNamespace(device_kind=kind) for kind in kinds]


def test_peak_rate_is_peaks_over_operations_of_a_token():
    table = 0 if MODEL.tie_embeddings else 96 * 32
    flops = 6 * (num_params(MODEL) - table) + 12 * 2 * 32 * 16
    found = peak_tokens_per_second(devices("TPU v5 lite", "TPU v4"), PER_TOKEN)
    assert found == pytest.approx((197e12 + 275e12) / flops, rel=1e-12)


@pytest.mark.parametrize("kinds", [("cpu",), ("TPU v4", "cpu"), ("TPU v99",)])
def test_unknown_peaks_give_none(kinds):
    assert peak_tokens_per_second(devices(*kinds), PER_TOKEN) is None


@pytest.mark.parametrize(("peak", "share"), [(400.0, 0.25), (None, None)])
def test_the_share_goes_to_the_line_and_to_timing(tmp_path, peak, share):
    out = io.StringIO()
    bar = RunProgress(4, console=Console(file=out, width=140))
    with MetricsWriter(tmp_path, mirrors=()) as writer, bar:
        watch = Watch(writer, bar, 0.0, peak)
        watch(Clock(4, 2.0, 1.0, 100.0, 0.0, 1, 1000))
    (line,) = (tmp_path / "timing.jsonl").read_text().splitlines()
    assert json.loads(line).get("mfu") == share
    assert ("MFU 25.0 %" in out.getvalue()) == (share is not None)
