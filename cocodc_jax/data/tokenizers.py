"""Text to token ids and back: bytes, trained BPE, Hugging Face and SentencePiece.

Every tokenizer reports a `vocab_size` rounded up to a multiple of 16, so that the
embedding and the output layer split evenly over a model axis of 2, 4, 8 or 16 devices.
For bytes that is 272: 256 bytes, one end-of-text token and 15 rows that are never
used, which cost a model of width 128 under 4,000 parameters (384, a multiple of a TPU's
128 lanes, would cost eight times as much). Ids at or above the count of real tokens
are never produced.
"""

import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

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
_VOCAB_MULTIPLE = 16
_NUM_BYTES = 256


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; every id is below it."""
        ...

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Short text that two tokenizers share only if they encode alike."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Encode text as int32 ids `[num_tokens]`, without an end-of-text token."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Decode ids, leaving out the end-of-text token."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 ... 255, end of text as 256.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né").tolist()
    [110, 195, 169]
    >>> tokenizer.decode(np.array([110, 195, 169, 256]))
    'né'
    """

    vocab_size = 272
    eos_id = _NUM_BYTES
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Encode text as its UTF-8 bytes, int32 `[num_bytes]`."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Decode bytes; broken UTF-8, as at a cut, becomes U+FFFD."""
        ids = np.asarray(ids)
        return ids[ids < _NUM_BYTES].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer`, from a `tokenizer.json` or trained by `train_bpe`."""

    def __init__(self, tokenizer: Any):
        ids = (tokenizer.token_to_id(token) for token in _EOS_CANDIDATES)
        eos_id = next((i for i in ids if i is not None), None)
        if eos_id is None:
            raise ValueError(
                "the tokenizer has no end-of-text token; it needs one of "
                f"{', '.join(_EOS_CANDIDATES)}"
            )
        # A document that spells out a special token is text like any other.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.eos_id = int(eos_id)
        self.vocab_size = _round_up(tokenizer.get_vocab_size(with_added_tokens=True))
        self.fingerprint = "hf-" + _digest(tokenizer.to_str().encode())

    def encode(self, text: str) -> np.ndarray:
        """Encode text as int32 `[num_tokens]`, adding no special tokens."""
        return np.array(
            self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32
        )

    def decode(self, ids: np.ndarray) -> str:
        """Decode ids, leaving out special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist())


class SentencePieceTokenizer:
    """A SentencePiece model with an end-of-sentence piece."""

    def __init__(self, model: bytes):
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(model)
        if self._processor.eos_id() < 0:
            raise ValueError("the SentencePiece model has no end-of-sentence piece")
        self.eos_id = int(self._processor.eos_id())
        self.vocab_size = _round_up(self._processor.GetPieceSize())
        self.fingerprint = "sentencepiece-" + _digest(model)

    def encode(self, text: str) -> np.ndarray:
        """Encode text as int32 `[num_tokens]`, adding no control pieces."""
        return np.array(self._processor.EncodeAsIds(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Decode ids; control pieces decode to nothing."""
        return self._processor.DecodeIds(np.asarray(ids).tolist())


def check_tokenizer_name(name: str) -> None:
    """Check the form of a tokenizer's name, reading no file.

    Args:
      name: as in `DataConfig.tokenizer`.

    Raises:
      ValueError: if no tokenizer is named so.
    """
    kind, _, rest = name.partition(":")
    if kind == "bpe":
        _bpe_vocab_size(name)
    elif name != "bytes" and not (kind in ("hf", "sentencepiece") and rest):
        raise ValueError(
            f"tokenizer={name!r} is unknown; use 'bytes', 'bpe:VOCAB', "
            "'hf:/path/tokenizer.json' or 'sentencepiece:/path.model'"
        )


def load_tokenizer(
    name: str, texts: Iterable[str], corpus_fingerprint: str, folder: pathlib.Path
) -> Tokenizer:
    """Make the tokenizer called `name`.

    Args:
      name: as in `DataConfig.tokenizer`.
      texts: documents that `bpe:VOCAB` is trained on; not read otherwise.
      corpus_fingerprint: names the corpus in the file of a trained tokenizer.
      folder: where a trained tokenizer is kept.

    Returns:
      The tokenizer.

    Raises:
      ValueError: if the name is unknown or its file cannot be read.
    """
    check_tokenizer_name(name)
    kind, _, path = name.partition(":")
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "bpe":
        return _cached_bpe(_bpe_vocab_size(name), texts, corpus_fingerprint, folder)
    make = _load_huggingface if kind == "hf" else SentencePieceTokenizer
    try:
        return make(pathlib.Path(path).expanduser().read_bytes())
    # The two libraries raise bare Exception and RuntimeError for a malformed file.
    except Exception as error:
        raise ValueError(f"tokenizer={name!r} cannot be read: {error}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Train byte-level BPE; equal texts give an equal tokenizer.

    Args:
      texts: the documents to learn merges from.
      vocab_size: tokens at most, the end-of-text token included; at least 257.

    Returns:
      The tokenizer.
    """
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
) -> HuggingFaceTokenizer:
    path = folder / f"bpe-{vocab_size}-{_digest(corpus.encode())}.json"
    if not path.exists():
        text = train_bpe(texts, vocab_size)._tokenizer.to_str()
        folder.mkdir(parents=True, exist_ok=True)
        # A rename is atomic: another process sees no file or a whole one.
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    return _load_huggingface(path.read_bytes())


def _load_huggingface(content: bytes) -> HuggingFaceTokenizer:
    import tokenizers as hf

    return HuggingFaceTokenizer(hf.Tokenizer.from_buffer(content))


def _bpe_vocab_size(name: str) -> int:
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or int(size) < _NUM_BYTES + 1:
        raise ValueError(
            f"tokenizer={name!r} needs a vocabulary of at least {_NUM_BYTES + 1} "
            "tokens (the bytes and end of text), such as 'bpe:4096'"
        )
    return int(size)


def _round_up(count: int) -> int:
    return -(-count // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
