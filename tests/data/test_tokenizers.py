"""Tokenizers round-trip text, keep ids below vocab_size, and name bad files."""

import io
import json
import re

import numpy as np
import pytest
import sentencepiece
import tokenizers as hf
from hypothesis import example, given
from hypothesis import strategies as st

from cocodc_jax.data.tokenizers import ByteTokenizer, load_tokenizer, train_bpe

TEXTS = [f"def f{i}(x):\n    return x + {i}  # größer, 数\n" for i in range(200)]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 300)


def _load(name, tmp_path, texts=()):
    return load_tokenizer(name, texts, "corpus", tmp_path)


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode("utf-8"))
    assert tokenizer.decode(np.append(ids, tokenizer.eos_id)) == text


def test_bytes_vocabulary_and_a_cut_character():
    tokenizer = ByteTokenizer()
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (256, 272)
    assert tokenizer.decode(np.array([0xC3, 97])) == "\ufffda"


@given(text=st.text(max_size=50))
@example(text="print('<|endoftext|>')")
def test_bpe_round_trip(bpe, text):
    ids = bpe.encode(text)
    assert ids.dtype == np.int32
    assert bpe.decode(np.append(ids, bpe.eos_id)) == text
    assert (ids < bpe.vocab_size).all()
    assert bpe.eos_id not in ids


def test_bpe_compresses_its_corpus(bpe):
    text = "".join(TEXTS)
    assert len(bpe.encode(text)) < 0.5 * len(text.encode())
    assert bpe.vocab_size == 304  # 300 rounded up to a multiple of 16


def test_bpe_is_trained_once(tmp_path):
    first = _load("bpe:300", tmp_path, TEXTS)
    (file,) = tmp_path.iterdir()

    (tmp_path / "new").touch()
    assert file.stat().st_mode == (tmp_path / "new").stat().st_mode
    (tmp_path / "new").unlink()

    second = _load("bpe:300", tmp_path, iter(["never read"]))
    assert first.fingerprint == second.fingerprint
    assert list(tmp_path.iterdir()) == [file]


def test_a_damaged_bpe_is_named_and_another_corpus_has_another_one(tmp_path):
    first = _load("bpe:300", tmp_path, TEXTS)
    (file,) = tmp_path.iterdir()

    file.write_text("{")
    with pytest.raises(ValueError, match=f"'bpe:300' cannot .*; remove {file} to"):
        _load("bpe:300", tmp_path)

    file.unlink()
    other = load_tokenizer("bpe:300", ["other text " * 9], "other corpus", tmp_path)
    assert other.fingerprint != first.fingerprint


def test_settings_of_earlier_calls_in_a_file_are_ignored(tmp_path, bpe):
    tokenizer = hf.Tokenizer.from_str(bpe._tokenizer.to_str())
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=12, pad_token="<|endoftext|>")
    tokenizer.model.dropout = 0.5

    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    loaded = _load(f"hf:{path}", tmp_path)

    for text in ("x", "".join(TEXTS)):
        assert loaded.encode(text).tolist() == bpe.encode(text).tolist()
    assert loaded.fingerprint == bpe.fingerprint


@pytest.fixture
def folder(tmp_path, bpe):
    """A tokenizer in Hugging Face's format, with an unusual end-of-text token."""
    tokenizer = hf.Tokenizer.from_str(bpe._tokenizer.to_str())
    tokenizer.add_special_tokens(["<|fin|>"])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())

    config = {
        "eos_token": {"content": "<|fin|>", "special": True},
        "pad_token": "<|pad|>",
        "added_tokens_decoder": {"300": {"content": "<|fin|>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_byte_order_mark_before_a_tokenizer_is_passed_over(folder, tmp_path):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")

    assert _load(f"hf:{folder}", tmp_path).num_tokens == 301
    assert _load(f"hf:{path}", tmp_path).num_tokens == 301


def test_the_end_of_text_is_read_from_a_folder(folder, bpe, tmp_path):
    loaded = _load(f"hf:{folder}", tmp_path)
    assert (loaded.eos_id, loaded.num_tokens, loaded.vocab_size) == (300, 301, 304)
    assert loaded.encode(TEXTS[3]).tolist() == bpe.encode(TEXTS[3]).tolist()
    alone = _load(f"hf:{folder / 'tokenizer.json'}", tmp_path)
    assert alone.eos_id == bpe.eos_id
    assert alone.fingerprint != loaded.fingerprint
    for name, content in loaded.files().items():
        assert (folder / name).read_bytes() == content


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>"},
         "eos_token is '</s>' in tokenizer_config.json, and tokenizer.json has no"),
        ("tokenizer_config.json", {"bos_token": "<s>"}, "bos_token is '<s>' in"),
        ("tokenizer_config.json",
         {"added_tokens_decoder": {"7": {"content": "<|fin|>"}}},
         "'<|fin|>' has the id 7 in tokenizer_config.json and 300 in tokenizer.json"),
        ("config.json", {"vocab_size": 300},
         "tokenizer.json has ids up to 300, and vocab_size is 300 in"),
    ],
)  # fmt: skip
def test_a_folder_that_disagrees_is_refused(folder, tmp_path, file, changes, message):
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=re.escape(message)):
        _load(f"hf:{folder}", tmp_path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"the folder has no tokenizer.json$"):
        _load(f"hf:{tmp_path}", tmp_path)
    (tmp_path / "m.model").write_bytes(b"")
    with pytest.raises(ValueError, match="; use sentencepiece:.*m.model"):
        _load(f"hf:{tmp_path}", tmp_path)


@pytest.mark.parametrize("text", ["né\n\t \x00 数", "".join(map(chr, range(300)))])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_tokenizer_written_to_files_is_read_as_it_was(tmp_path, bpe, kind, text):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, content in tokenizer.files().items():
        (folder / name).write_bytes(content)

    again = _load(f"hf:{folder}", tmp_path)

    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert again.decode(tokenizer.encode(text)) == text
    assert again.eos_id == tokenizer.eos_id
    assert again.num_tokens == tokenizer.num_tokens


def test_a_sentencepiece_file_round_trips(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(t for t in TEXTS),
        model_writer=model,
        vocab_size=100,
        minloglevel=2,
    )
    path = tmp_path / "m.model"
    path.write_bytes(model.getvalue())

    tokenizer = _load(f"sentencepiece:{path}", tmp_path)
    ids = tokenizer.encode("return x + 7")
    assert ids.dtype == np.int32
    assert tokenizer.decode(np.append(ids, tokenizer.eos_id)) == "return x + 7"
    assert tokenizer.vocab_size == 112
    assert tokenizer.eos_id == 2

    files = tokenizer.files()
    assert files["tokenizer.model"] == model.getvalue()
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "</s>"


@pytest.mark.parametrize("kind", ["hf", "sentencepiece"])
def test_a_missing_file_is_named(tmp_path, kind):
    with pytest.raises(ValueError, match=f"tokenizer='{kind}:/no/file' cannot be read"):
        _load(f"{kind}:/no/file", tmp_path)
    with pytest.raises(ValueError, match=f"tokenizer='{kind}:~nobody.*: .* without ~"):
        _load(f"{kind}:~nobody-here/x", tmp_path)


@pytest.mark.parametrize("kind", ["hf", "sentencepiece"])
def test_an_unreadable_file_is_named(tmp_path, kind):
    broken = tmp_path / "broken"
    broken.write_text("{not a tokenizer")
    with pytest.raises(ValueError, match=f"tokenizer='{kind}:.*broken' cannot be read"):
        _load(f"{kind}:{broken}", tmp_path)


def test_tokenizer_without_end_of_text_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    text = train_bpe(TEXTS, 300)._tokenizer.to_str()
    path.write_text(text.replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(ValueError, match="no end-of-text token; it needs one of"):
        _load(f"hf:{path}", tmp_path)
