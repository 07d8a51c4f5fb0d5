"""The short form names the compressors of the long one; errors name the repair."""

import inspect
import re

import jax
import numpy as np
import pytest

from cocodc_jax.transforms import compression

PAIRS = {
    "none": "identity",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp4": "fp4",
    "int8": "int8",
    "int4:128": "int4(block_size=128)",
    "int2": "int2",
    "stat2": "stat2",
    "matrices+stat2": "matrices(stat2)",
    "sign": "sign",
    "topk:0.25": "top_k(density=0.25)",
    "topk:0.25+fp4": "top_k(density=0.25, values=fp4())",
    "threshold:0.25": "threshold(density=0.25)",
    "chunked:3+int2": "chunked_top_k(k=3, values=int2())",
    "dct:3": "dct_top_k(k=3)",
    "lowrank:2+int4": "low_rank(rank=2, factors=int4())",
    "ef+topk:0.25": "error_feedback(top_k(density=0.25))",
    "ef:0.5+chunked:3+int2:8": (
        "error_feedback(chunked_top_k(k=3, values=int2(block_size=8)), decay=0.5)"
    ),
}


def program_of(built):
    """Return the written operations, their constants, and the results."""

    def encode(x):
        # Twice, so that a decay shows.
        _, state = built.encode(x, built.init(x))
        return built.encode(x[::-1], state)[0]

    x = np.zeros((10, 12), np.float32)
    traced, message = jax.make_jaxpr(encode, return_shape=True)(x)
    return re.sub("0x[0-9a-f]+", "", str(traced)), traced.consts, message


@pytest.mark.parametrize("text", PAIRS)
def test_short_and_long_form_send_the_same(text):
    short, long = map(compression.parse, (text, PAIRS[text]))
    assert short.name == long.name
    (operations, constants, message), (others, other_constants, other_message) = map(
        program_of, (short, long)
    )
    assert operations == others
    jax.tree.map(np.testing.assert_array_equal, constants, other_constants)
    assert message == other_message


def test_every_name_is_covered():
    used = {part.partition(":")[0] for text in PAIRS for part in text.split("+")}
    assert used == set(compression._PARTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int3", r"compress='int3': 'int3' is not one of \('none', 'float16'"),
        ("top_k:0.1", "'top_k' is not one of .*'topk'"),
        ("topk:ten", "'topk:ten': density='ten' must be a number"),
        ("topk:nan", "density='nan' must be a number"),
        ("lowrank:0.5", r"rank='0\.5' must be a whole number"),
        ("lowrank:", "rank='' must be a whole number"),
        ("none:3", "'none:3' takes no number"),
        ("fp4+int4", "'fp4' takes nothing after it, but has 'int4'"),
        ("lowrank:4+", "compress='lowrank:4\\+': '' is not one of"),
        ("ef", r"'ef' needs what it wraps, as in 'ef\+topk:0\.01'"),
        ("topk:2", "compress='topk:2': density=2.0 must be above 0 and at most 1"),
        ("ef:1.5+fp4", r"decay=1\.5 must be between 0 and 1"),
        ("dct:-1", "k=-1 must be at least 1"),
        ("lowrank:4+matrices+int8", r"matrices\(int8\) is given values without"),
        ("topk:0.1+ef+int4", r"error_feedback\(int4\) keeps a state"),
        ("", "compress='': '' is not one of"),
        ("int4(", "compress='int4\\('"),
        ("int4(blocks=3)", "unexpected keyword argument 'blocks'"),
        ("int4(block_size=0)", "block_size=0 must be at least 1"),
        ("os.system('true')", r"'os\.system' is not one of"),
        ("chunked_top_k(k=0)", "k=0 must be at least 1"),
        ("dct_top_k(chunk_side=0)", "chunk_side=0 must be at least 1"),
        ("low_rank(rank=0)", "rank=0 must be at least 1"),
        ("error_feedback", "missing 1 required positional argument: 'inner'"),
        ("top_k(values=error_feedback(int4))", "keeps a state"),
        ("low_rank(factors=low_rank())", "keeps a state"),
        ("threshold(density=0)", "density=0 must be"),
        ("top_k('0.1')", "density='0.1' must be above 0"),
        ("threshold(slack='2')", "slack='2' must be at least 1"),
        ("threshold(slack=0.5)", r"slack=0\.5 must be at least 1"),
        ("threshold(every=0)", "every=0 must be at least 1"),
        ("threshold(slack=1e999)", "slack=inf must be at least 1 and finite"),
        ("threshold(values=low_rank())", "keeps a state"),
        ("(0.5)", r"compress='\(0\.5\)' is not a call of"),
        ("int8(block_size=2.5)", "block_size=2.5 must be a whole number, at"),
        ("chunked_top_k(k=2.5)", "k=2.5 must be a whole number, at"),
        ("dct_top_k(chunk_side=8.5)", "chunk_side=8.5 must be a whole number, at"),
        ("low_rank(rank=1.5)", "rank=1.5 must be a whole number, at"),
        ("threshold(every=2.5)", "every=2.5 must be a whole number, at"),
    ],
)
def test_wrong_forms_are_named(monkeypatch, text, message):
    # As users have them: only in tests are types checked at every call.
    plain = {name: inspect.unwrap(f) for name, f in compression.FACTORIES.items()}
    monkeypatch.setattr(compression, "FACTORIES", plain)
    with pytest.raises(ValueError, match=message):
        compression.parse(text)


@pytest.mark.parametrize("value", [None, 4, compression.int8()])
def test_values_other_than_text_are_refused(value):
    with pytest.raises(ValueError, match="^compress=.{1,30} must be text, such as 'ef"):
        inspect.unwrap(compression.parse)(value)
