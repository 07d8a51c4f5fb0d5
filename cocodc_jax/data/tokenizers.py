"""Text to token ids and back: bytes, trained BPE, Hugging Face and SentencePiece.

Every tokenizer reports a `vocab_size` rounded up to a multiple of 16, so that a model
axis of 2, 4, 8 or 16 devices divides the embedding and the output layer. For bytes that
is 272: 256 bytes, end of text, and 15 rows whose ids are never produced.
"""

import abc
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from cocodc_jax._extras import extra
from cocodc_jax.data.config import make_writable
from cocodc_jax.files import without_mark, write_whole
from cocodc_jax.paths import expanded

_VOCAB_MULTIPLE = 16
_NUM_BYTES = 256
EOS_TOKEN = "<|endoftext|>"
_EOS_CANDIDATES = (
    EOS_TOKEN,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "[SEP]",
)
JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
# What else a tokenizer may have beside it.
_BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_CHECKED = ("bos_token", "eos_token", "unk_token")


class Tokenizer(abc.ABC):
    """The interface that the data pipeline needs of a tokenizer."""

    num_tokens: int  # One more than the largest id.
    eos_id: int  # Of the token that ends a document.
    fingerprint: str  # Two tokenizers share it only if they encode equally.

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; every id is below it."""
        return round_up(self.num_tokens)

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Encode text as int32 ids `[num_tokens]`, without an end-of-text token."""

    @abc.abstractmethod
    def decode(self, ids: np.ndarray) -> str:
        """Decode ids, leaving out the end-of-text token."""

    @abc.abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the files that transformers' `AutoTokenizer` reads, by name."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 ... 255, end of text as 256.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né").tolist()
    [110, 195, 169]
    >>> tokenizer.decode(np.array([110, 195, 169, 256]))
    'né'
    """

    num_tokens = _NUM_BYTES + 1
    eos_id = _NUM_BYTES
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Encode text as its UTF-8 bytes, int32 `[num_bytes]`."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Decode bytes; invalid UTF-8, as at a cut, becomes U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < _NUM_BYTES].astype(np.uint8).tobytes().decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """Return an equal tokenizer as a `tokenizer.json`."""
        import tokenizers as hf
        from tokenizers import decoders, models, pre_tokenizers

        # The library writes a byte as a printable character, as GPT-2 did: itself where
        # it is one in Latin-1, else one of those from 256 on.
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        names = [chr(b if b in printable else next(others)) for b in range(256)]
        vocabulary = {name: i for i, name in enumerate(names)}
        tokenizer = hf.Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([EOS_TOKEN])

        return _files_of(tokenizer, EOS_TOKEN)


def _read_folder(path: pathlib.Path) -> dict[str, bytes]:
    """Return the content of a folder's Hugging Face tokenizer files, by name."""
    if not (path / JSON).is_file():
        pieces = sorted(path.glob("*.model"))
        instead = f"; use sentencepiece:{pieces[0]}" if pieces else ""
        raise ValueError(f"the folder has no {JSON}{instead}")

    names = (JSON, CONFIG, *_BESIDE)
    return {n: (path / n).read_bytes() for n in names if (path / n).is_file()}


def _token_config(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the settings of the tokens in a folder's files."""
    return json.loads(files.get(CONFIG, b"{}"))


def _check_folder(
    path: pathlib.Path, token_config: dict[str, Any], tokenizer: Any
) -> None:
    """Check that a folder's files agree with one another, and with a model's there."""
    for name in _CHECKED:
        token = _content(token_config.get(name))
        if token is not None and tokenizer.token_to_id(token) is None:
            raise ValueError(
                f"{name} is {token!r} in {CONFIG}, and {JSON} has no such token"
            )

    for config_id, entry in token_config.get("added_tokens_decoder", {}).items():
        stored_id = tokenizer.token_to_id(_content(entry))
        if stored_id != int(config_id):
            raise ValueError(
                f"{_content(entry)!r} has the id {config_id} in {CONFIG} and "
                f"{stored_id} in {JSON}"
            )

    model = path / "config.json"
    rows = json.loads(model.read_bytes()).get("vocab_size") if model.exists() else 0
    needed = _num_ids(tokenizer)
    if rows and rows < needed:
        raise ValueError(
            f"{JSON} has ids up to {needed - 1}, and vocab_size is {rows} in the "
            "model's config.json beside it"
        )


def _content(token: Any) -> Any:
    """Return the text of a token, which may be in a table with its settings."""
    return token.get("content") if isinstance(token, dict) else token


def _num_ids(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _files_of(tokenizer: Any, eos_token: str) -> dict[str, bytes]:
    config = _config(
        "PreTrainedTokenizerFast", eos_token, clean_up_tokenization_spaces=False
    )
    return {JSON: tokenizer.to_str().encode(), CONFIG: config}


def _config(tokenizer_class: str, eos_token: str, **more: bool) -> bytes:
    values = {"tokenizer_class": tokenizer_class, "eos_token": eos_token, **more}
    return json.dumps(values, indent=2).encode()


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`, from a `tokenizer.json` or trained by `train_bpe`."""

    def __init__(self, tokenizer: Any, files: dict[str, bytes] | None = None):
        named_eos = _content(_token_config(files or {}).get("eos_token"))
        known_eos = [x for x in _EOS_CANDIDATES if tokenizer.token_to_id(x) is not None]
        if not (named_eos or known_eos):
            raise ValueError(
                "the tokenizer has no end-of-text token; it needs one of "
                f"{', '.join(_EOS_CANDIDATES)}, or an eos_token in {CONFIG}"
            )

        self._eos_token = named_eos or known_eos[0]
        self._tokenizer = tokenizer
        self._files = files if named_eos else None
        # A document that spells out a special token is text like any other.
        tokenizer.encode_special_tokens = True

        # What a file keeps would cut documents, pad them, or encode them by chance.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None
        self.eos_id = int(tokenizer.token_to_id(self._eos_token))
        self.num_tokens = _num_ids(tokenizer)
        content = tokenizer.to_str() + (named_eos or "")
        self.fingerprint = "hf-" + _digest(content.encode())

    def encode(self, text: str) -> np.ndarray:
        """Encode text as int32 `[num_tokens]`, adding no special tokens."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Decode ids, leaving out special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist())

    def files(self) -> dict[str, bytes]:
        """Return the folder's files, or equivalent ones."""
        return self._files or _files_of(self._tokenizer, self._eos_token)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with an end-of-sentence piece."""

    def __init__(self, model: bytes):
        with extra("data"):
            import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)
        if self._processor.eos_id() < 0:
            raise ValueError("the SentencePiece model has no end-of-sentence piece")

        self._model = model
        self.eos_id = int(self._processor.eos_id())
        self.num_tokens = self._processor.GetPieceSize()
        self.fingerprint = "sentencepiece-" + _digest(model)

    def encode(self, text: str) -> np.ndarray:
        """Encode text as int32 `[num_tokens]`, adding no control pieces."""
        return np.array(self._processor.EncodeAsIds(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Decode ids; control pieces decode to nothing."""
        return self._processor.DecodeIds(np.asarray(ids).tolist())

    def files(self) -> dict[str, bytes]:
        """Return the model as `LlamaTokenizer` reads it."""
        eos_token = self._processor.IdToPiece(self.eos_id)
        config = _config("LlamaTokenizer", eos_token, add_bos_token=False)
        return {"tokenizer.model": self._model, CONFIG: config}


def load_tokenizer(
    name: str, texts: Iterable[str], corpus_fingerprint: str, folder: pathlib.Path
) -> Tokenizer:
    """Return the tokenizer called `name`; `folder` caches trained BPE."""
    kind, _, path = name.partition(":")
    if kind == "bytes":
        return ByteTokenizer()

    if kind == "bpe":
        path = _cached_bpe(int(path), texts, corpus_fingerprint, folder)
    place = expanded(path, f"tokenizer={name!r}")
    try:
        if kind == "sentencepiece":
            return SentencePieceTokenizer(place.read_bytes())

        with extra("data"):
            import tokenizers as hf

        if kind == "hf" and place.is_dir():
            files = _read_folder(place)
            whole = hf.Tokenizer.from_buffer(without_mark(files[JSON]))
            _check_folder(place, _token_config(files), whole)
            return HuggingFaceTokenizer(whole, files)

        content = without_mark(place.read_bytes())
        return HuggingFaceTokenizer(hf.Tokenizer.from_buffer(content))
    # The two libraries raise bare Exception and RuntimeError for a malformed file.
    except Exception as error:
        why = f"{error}; remove {path} to train again" if kind == "bpe" else error
        raise ValueError(f"tokenizer={name!r} cannot be read: {why}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Train byte-level BPE; equal texts give an equal tokenizer."""
    with extra("data"):
        import tokenizers as hf
        from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = hf.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)

    return HuggingFaceTokenizer(tokenizer)


def _cached_bpe(
    vocab_size: int, texts: Iterable[str], corpus: str, folder: pathlib.Path
) -> str:
    path = folder / f"bpe-{vocab_size}-{_digest(corpus.encode())}.json"
    if not os.path.exists(path):
        make_writable(folder)
        # Another process sees no file or a whole one, and other users may read it.
        write_whole(path, train_bpe(texts, vocab_size)._tokenizer.to_str())
    return str(path)


def round_up(num_tokens: int) -> int:
    """Return the rows of an embedding for so many tokens."""
    return -(-num_tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
