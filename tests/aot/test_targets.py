"""Machines are parsed, their chips divided, and missing compilers named."""

import importlib.util

import pytest

from cocodc_jax.aot import job
from cocodc_jax.aot.collectives import Collective
from cocodc_jax.aot.hlo import Array
from cocodc_jax.aot.programs import place
from cocodc_jax.aot.report import remedies
from cocodc_jax.aot.targets import Target
from cocodc_jax.chips import CHIPS, peak_flops
from cocodc_jax.run.config.presets import PRESETS


@pytest.mark.parametrize(
    ("text", "slices", "num_chips"),
    [
        ("v5e:4x4", 4, 64),
        ("v5p:4x4x4", 2, 128),
        ("7x:2x2x1", 1, 4),
        ("H100:4", 1, 32),
        ("tpu7x:2x2x2", 1, 8),
    ],
)
def test_a_target_is_read(text, slices, num_chips):
    target = Target.parse(text, slices)
    assert target.num_chips == num_chips
    assert Target.parse(str(target), slices) == target


@pytest.mark.parametrize(
    ("text", "slices", "message"),
    [
        ("v9:4x4", 1, "target='v9:4x4' is no chip of v4, v5e"),
        ("v5e", 1, "write it as v5e:4x4"),
        ("v5p:4x4", 1, "write it as v5p:4x4x4"),
        ("v5e:4x0", 1, "write it as v5e:4x4"),
        ("h100:2x2", 1, "write it as h100:4, in hosts of 8 GPUs"),
        ("v5e:4x4", 0, "slices=0 must be at least 1"),
        ("h100:4", 2, "slices=2 is of TPUs; give GPUs' hosts as target=h100:8"),
    ],
)
def test_invalid_targets_are_refused(text, slices, message):
    with pytest.raises(ValueError, match=message):
        Target.parse(text, slices)


def test_a_chip_that_shows_as_two_devices_is_halved():
    half = Target.parse("7x:2x2x1").per_device(8)
    assert half.flops == CHIPS["7x"].flops / 2
    assert half.hbm_bytes == CHIPS["7x"].hbm_bytes // 2


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12),
     ("TPU v6 lite", 918e12), ("TPU7x", 2307e12 / 2), ("NVIDIA H200", 989e12),
     ("cpu", None), ("TPU v99", None)],
)  # fmt: skip
def test_peak_of_a_device_by_its_kind(kind, peak):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize(("text", "extra"), [("v5e:4x4", "tpu"), ("h200:1", "cuda")])
def test_a_compiler_that_is_missing_is_named(monkeypatch, text, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ValueError, match=rf"pip install 'cocodc_jax\[{extra}\]'"):
        Target.parse(text).check_installed()


def test_a_machine_is_divided_over_regions():
    config = place(
        PRESETS["paper_150m"], Target.parse("v5e:4x4", 4), keep_data_axis=False
    )
    assert config.run.data_axis == 16
    assert config.run.exchange == "program"

    wide = PRESETS["1b"].replace(model_axis=4)
    machine = Target.parse("v5p:4x4x4")
    chosen = place(wide, machine, keep_data_axis=False)
    assert chosen.run.data_axis == 4

    kept = place(wide.replace(data_axis=4), machine, keep_data_axis=True)
    assert kept.run.data_axis == 4
    with pytest.raises(ValueError, match="do not divide the 16 chips .* none left"):
        place(wide, machine, keep_data_axis=True)


@pytest.mark.parametrize(
    ("changes", "target", "message"),
    [
        (dict(regions=3, eval_batches=3), ("v5e:4x4", 1), "regions=3 do not divide"),
        (dict(regions=4), ("v5e:4x4", 8), "slices=8 do not hold regions=4"),
        (dict(model_axis=3), ("v5e:4x4", 4), "do not divide the 16 chips of a region"),
    ],
)
def test_a_machine_that_regions_cannot_share_is_refused(changes, target, message):
    with pytest.raises(ValueError, match=message):
        place(
            PRESETS["paper_150m"].replace(**changes),
            Target.parse(*target),
            keep_data_axis=False,
        )


def test_the_compilers_refusals_are_read():
    tpu = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for "
    tpu += "HLO temporaries (36.57G) exceeds available HBM (15.75G)."
    assert job.needed_bytes(tpu) == int(36.57 * 2**30)
    used = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.26G of"
    assert job.needed_bytes(used) == int(17.26 * 2**30)
    assert job.needed_bytes("RESOURCE_EXHAUSTED: so much") == 0
    assert job.needed_bytes("INTERNAL: 3 of 4") is None


@pytest.mark.parametrize(
    ("hidden_s", "seconds", "limit"), [(2, 5, "links"), (8, 9, "network")]
)
def test_a_roofline_by_hand(hidden_s, seconds, limit):
    """A message that spans the steps adds no time, unless it takes longer."""
    chip = CHIPS["v5e"]

    def moves(axes, num_bytes, spans):
        array = Array("f32", (1,))
        return Collective(
            kind="all-reduce",
            axes=axes,
            num_bytes=num_bytes,
            times=2,
            is_async=True,
            spans=spans,
            array=array,
            name="x",
        )

    roofline = job.estimate(
        chip,
        chip.flops * 3,
        chip.hbm_bps * 2,
        [
            moves(("data",), chip.link_bps * 2, spans=False),
            moves(("region",), chip.network_bps / 2, spans=False),
            moves(("slice",), chip.network_bps * hidden_s / 2, spans=True),
        ],
    )

    assert (roofline.compute_s, roofline.hbm_s, roofline.link_s) == (3, 2, 4)
    assert (roofline.network_s, roofline.hidden_s) == (1, hidden_s)
    assert (roofline.seconds, roofline.limit) == (seconds, limit)


def test_remedies_build_on_each_other_and_change_numbers_last():
    config = place(
        PRESETS["paper_150m"], Target.parse("v5e:4x4", 4), keep_data_axis=False
    )
    combined = list(remedies(config))
    assert combined[0][0] == "--remat=full"
    assert combined[1][0] == "--remat=full --loss_chunk_tokens=512"

    parts = [config.run.accumulate_steps for _, config in combined]
    assert parts[2:6] == [2, 4, 8, 16]
    assert combined[6][1].run.model_axis == 2
    assert combined[-1][1].data.batch_per_region < 256
    assert all("batch_per_region" not in text for text, _ in combined[:9])
