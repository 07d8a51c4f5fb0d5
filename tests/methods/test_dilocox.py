"""DiLoCoX: a rank that adapts, or stays."""

import jax
import pytest

from cocodc_jax import methods
from cocodc_jax.sync.messages import Compressed, Ranked
from cocodc_jax.sync.schedules import one_step_stale, ranked_rounds
from cocodc_jax.sync.summed import SummedFactors


def test_the_adaptive_rank_has_its_parts():
    method = methods.get("dilocox", sync_interval=10, rank=8, min_rank=2)
    assert method.schedule == ranked_rounds(10, 8, 2)
    assert isinstance(method.sync.message, Ranked)
    compressor = method.sync.message.compressor(2)
    assert compressor.name == "error_feedback(low_rank(int4))"


def test_a_fixed_rank_is_one_round_late():
    method = methods.get("dilocox", sync_interval=10, adaptive_rank=False)
    assert method.schedule == one_step_stale(10)
    assert isinstance(method.sync.message, Compressed)


def test_an_adaptive_rank_keeps_its_compressor():
    with pytest.raises(ValueError, match="'int8'.*'dilocox'.*adaptive_rank=False"):
        methods.get("dilocox", compress="int8")
    fixed = methods.get("dilocox", compress="int8", adaptive_rank=False)
    assert fixed.sync.message.by.name == "int8"


def test_summed_factors_have_their_own_message():
    method = methods.get("dilocox", rank=8, sum_factors=True)
    assert method.sync.message == SummedFactors(8, True)
    assert method.sync.only_in_program.startswith("its second factors are made of")
    fixed = methods.get("dilocox", rank=8, adaptive_rank=False, sum_factors=True)
    assert fixed.sync.message == SummedFactors(8)
    part = {"w": jax.ShapeDtypeStruct((64, 32), "float32")}
    assert fixed.sync.message.num_bytes(part, 4) == 4 * 8 * (64 + 32)
    with pytest.raises(ValueError, match="compress='int8'.*sum_factors=False"):
        methods.get("dilocox", sum_factors=True, compress="int8")
