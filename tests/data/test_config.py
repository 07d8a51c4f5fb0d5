"""Every bad setting is refused when the configuration is made."""

import pytest

from cocodc_jax.data.config import DataConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "c4"}, "dataset='c4' is unknown; use 'stdlib'"),
        ({"dataset": "text:"}, "dataset='text:' is unknown"),
        ({"dataset": "text:A,,B"}, "dataset='text:A,,B' has an empty path ''"),
        ({"tokenizer": "words"}, "tokenizer='words' is unknown; use 'bytes'"),
        ({"tokenizer": "hf:"}, "tokenizer='hf:' is unknown"),
        ({"tokenizer": "bpe:many"}, "tokenizer='bpe:many' needs a vocabulary of at"),
        ({"tokenizer": "bpe:256"}, "tokenizer='bpe:256' needs .* at least 257"),
        ({"tokenizer": f"bpe:{10**20}"}, "tokenizer='bpe:10+' .* at most 16777216"),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
        ({"batch_per_region": -1}, "batch_per_region=-1 must be at least 1"),
        ({"loader_threads": 0}, "loader_threads=0 must be at least 1"),
        ({"undecodable": "skip"}, "undecodable='skip' is of files, .* leave it out"),
        (
            {"undecodable": "replace", "dataset": "tfds:c4/en"},
            "undecodable='replace' is of files, .* and dataset='tfds:c4/en'; leave",
        ),
        ({"loader_threads": 2000}, "loader_threads=2000 is too many, .* at most 64"),
        (
            {"validation_fraction": 0.0},
            r"validation_fraction=0.0 is outside \(0, 0.5\]",
        ),
        ({"validation_fraction": 0.6}, "validation_fraction=0.6 is outside"),
        ({"text_field": "body"}, "text_field='body' is of sets with fields"),
        ({"seed": -1}, "seed=-1 is outside"),
        ({"seed": 2**32}, "seed=4294967296 is outside"),
        (
            {"shuffle_window_bytes": 8255, "sequence_length": 128},
            "shuffle_window_bytes=8255 is too small for sequence_length=128; "
            "use at least 8256",
        ),
    ],
)
def test_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)
