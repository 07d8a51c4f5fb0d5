"""A tokenizer's folder as Hugging Face keeps it: read and checked, and written.

`tokenizer.json` is the tokenizer, `tokenizer_config.json` tells which tokens are
special, and where a model is in the folder too, `config.json` tells how many rows its
embedding has.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

EOS_TOKEN = "<|endoftext|>"
_EOS_CANDIDATES = (
    EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]",
)  # fmt: skip
JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"
# What else a tokenizer may have beside it.
_BESIDE = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_CHECKED = ("bos_token", "eos_token", "unk_token")


@dataclasses.dataclass(frozen=True)
class TokenizerFolder:
    """What the files of a tokenizer say."""

    path: pathlib.Path  # The folder.
    files: dict[str, bytes]  # Their content, by name.

    @classmethod
    def read(cls, path: pathlib.Path) -> TokenizerFolder:
        """Read the files that are there."""
        if not (path / JSON).is_file():
            pieces = sorted(path.glob("*.model"))
            instead = f"; use sentencepiece:{pieces[0]}" if pieces else ""
            raise ValueError(f"the folder has no {JSON}{instead}")
        names = (JSON, CONFIG, *_BESIDE)
        found = {n: (path / n).read_bytes() for n in names if (path / n).is_file()}
        return cls(path, found)

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, None if the files do not say."""
        return _content(self._config.get("eos_token"))

    def check(self, tokenizer: Any) -> None:
        """Check that the files agree with one another."""
        said = self._config
        for name in _CHECKED:
            token = _content(said.get(name))
            if token is not None and tokenizer.token_to_id(token) is None:
                raise ValueError(
                    f"{name} is {token!r} in {CONFIG}, and {JSON} has no such token"
                )
        for there, entry in said.get("added_tokens_decoder", {}).items():
            here = tokenizer.token_to_id(_content(entry))
            if here != int(there):
                raise ValueError(
                    f"{_content(entry)!r} has the id {there} in {CONFIG} and {here} in "
                    f"{JSON}"
                )
        model = self.path / "config.json"
        rows = json.loads(model.read_bytes()).get("vocab_size") if model.exists() else 0
        if rows and rows < (needed := num_tokens(tokenizer)):
            raise ValueError(
                f"{JSON} has ids up to {needed - 1}, and vocab_size is {rows} in the "
                "model's config.json beside it"
            )

    @property
    def _config(self) -> dict[str, Any]:
        return json.loads(self.files.get(CONFIG, b"{}"))


def encode_plainly(tokenizer: Any) -> None:
    """Have a `tokenizers.Tokenizer` encode any text in full, always the same way."""
    # A document that spells out a special token is text like any other.
    tokenizer.encode_special_tokens = True
    # A file keeps what its tokenizer was called or trained with, by which documents
    # would be cut, end in padding, or be encoded by chance (BPE-dropout).
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


def find_eos_token(tokenizer: Any) -> str:
    """Return the token that ends a text, by its name."""
    for token in _EOS_CANDIDATES:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise ValueError(
        "the tokenizer has no end-of-text token; it needs one of "
        f"{', '.join(_EOS_CANDIDATES)}, or an eos_token in {CONFIG}"
    )


def num_tokens(tokenizer: Any) -> int:
    """Return one more than the largest id of a `tokenizers.Tokenizer`."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def files_of(tokenizer_json: str, eos_token: str) -> dict[str, bytes]:
    """Return the files that transformers' `AutoTokenizer` reads, by name."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    return {
        JSON: tokenizer_json.encode(),
        CONFIG: json.dumps(config, indent=2).encode(),
    }


def bytes_json() -> str:
    """Return a `tokenizer.json` of UTF-8's bytes as ids 0 ... 255, end of text as 256.

    The library writes a byte as a printable character, as GPT-2 did: itself where it is
    one in Latin-1, else one of those from 256 on.
    """
    import tokenizers as hf
    from tokenizers import decoders, models, pre_tokenizers

    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    names = [chr(b if b in printable else next(others)) for b in range(256)]
    tokenizer = hf.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS_TOKEN])
    return tokenizer.to_str()


def _content(token: Any) -> Any:
    """Return the text of a token, which may stand in a table with its settings."""
    return token.get("content") if isinstance(token, dict) else token
