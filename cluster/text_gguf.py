"""A tokenizer from the metadata of a GGUF file.

GGUF keeps vocabulary, merges and token types, but of the pre-tokenizer only a name, whose meaning is fixed by
llama.cpp (`llama-vocab.cpp`); the ones known here are in `PRE_TOKENIZERS`, any other is refused by name rather than
guessed, since a wrong split gives wrong ids without any error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelError
from engine.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types: control tokens have no text of their own; user-defined ones are never split, but are text."""

_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes_only()])


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _bytes_only,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": lambda: _split(_WORDS_LLAMA3),
    "llama3": lambda: _split(_WORDS_LLAMA3),
    "qwen2": lambda: _split(_WORDS_QWEN2),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3")
"""A word that is a token needs no merges."""
_NORMALIZED = ("qwen2",)


def read_gguf(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what `tokenizer_config.json` would say (`bos_token`, `eos_token`, `add_bos_token`,
    `chat_template`). ModelError names what is missing or unknown."""
    reader = GgufFile(path)
    if (kind := _field(reader, "model")) != "gpt2":
        raise ModelError(f"{path.name}: tokenizer.ggml.model {kind!r} is not supported; serve a Hugging Face directory")
    pre = str(_field(reader, "pre", "gpt-2"))
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{path.name}: tokenizer.ggml.pre {pre!r} is unknown (known: {known})")
    tokens: list[str] = _field(reader, "tokens")
    merges: list[str] = _field(reader, "merges")
    if tokens is None or merges is None:
        raise ModelError(f"{path.name}: tokenizer.ggml.tokens or .merges is missing")
    tokenizer = _build(pre, tokens, merges, _field(reader, "token_type", []))
    return tokenizer, _settings(reader, pre, tokens)


def _build(pre: str, tokens: list[str], merges: list[str], types: list[int]) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        chosen = [token for token, its in zip(tokens, types, strict=False) if its == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in chosen])
    return tokenizer


def _settings(reader: GgufFile, pre: str, tokens: list[str]) -> dict[str, Any]:
    def token(name: str) -> str | None:
        token_id = _field(reader, f"{name}_token_id")
        return tokens[token_id] if token_id is not None else None

    template = reader.get_field("tokenizer.chat_template")
    return {
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "add_bos_token": bool(_field(reader, "add_bos_token", pre in _WHOLE_WORDS_FIRST)),
        "chat_template": template.contents() if template else None,
    }


def _field(reader: GgufFile, name: str, default: Any = None) -> Any:
    field = reader.get_field(f"tokenizer.ggml.{name}")
    return default if field is None else field.contents()
