"""Text to token ids and back, for the model that is served: a Hugging Face directory or a GGUF file.

Three rules that differ between servers, as they are here:

* **BOS.** A completion's prompt gets one BOS when the tokenizer adds one, and not a second one when the text begins
  with it. A chat prompt gets exactly what its template writes, and a repeated BOS at its start counts once.
* **Special tokens in text.** In a completion's prompt `<|im_end|>` and the like are special tokens: such a prompt is
  written by a program that applies a template of its own. In the role and content of a chat message they are plain
  text, so that a user cannot end his own turn and speak as somebody else.
* **Answers** leave special tokens out.

Everything here is read-only after loading and may be used from several threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from cluster.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from cluster.templates import ChatTemplate
from cluster.text_gguf import read_gguf
from engine.errors import InvalidRequest, ModelError

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0x10FFFE))
_SLACK_TOKENS = 64
"""How many tokens fewer the whole of a text may have than its beginning: a cut can fall inside a long token."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Text:
    """The tokenizer, chat template and detokenizer of one model.

    `settings` has the keys of `tokenizer_config.json` that matter: `bos_token`, `eos_token`, `add_bos_token`,
    `chat_template`.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._special: dict[int, str] = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        }
        names = {name: _token_text(settings.get(name)) for name in _SPECIAL_NAMES}
        known = {name: text for name, text in names.items() if text is not None}
        self.eos_id: int | None = tokenizer.token_to_id(known["eos_token"]) if "eos_token" in known else None
        self._bos_id: int | None = tokenizer.token_to_id(known["bos_token"]) if "bos_token" in known else None
        self._add_bos: bool | None = settings.get("add_bos_token")
        source = _chat_template(settings.get("chat_template"))
        self._template = ChatTemplate(source, known) if source else None

    @classmethod
    def load(cls, model: str | Path, *, chat_template: str | None = None) -> Self:
        """From a directory with `tokenizer.json` or a `.gguf` file. `chat_template` (Jinja source) replaces the
        model's own. ModelError names what is missing."""
        path = Path(model)
        tokenizer, settings = _read_directory(path) if path.is_dir() else read_gguf(path)
        return cls(tokenizer, settings | ({"chat_template": chat_template} if chat_template else {}))

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    # -- to ids ----------------------------------------------------------------------------------------------

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a completion's prompt."""
        ids = self._tokenizer.encode(text, add_special_tokens=self._add_bos is not False).ids
        if self._add_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids = [self._bos_id, *ids]
        return self._with_one_bos(ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The ids of a conversation, ready for the assistant's answer. InvalidRequest names `messages`."""
        if self._template is None:
            raise InvalidRequest(
                "messages",
                "this model has no chat template; use /v1/completions, or set model.chat_template_file in the config",
            )
        guard = _unused_character(messages)
        rendered = self._template.render([_guarded(message, self._special_pattern, guard) for message in messages])
        if guard not in rendered:
            return self._with_one_bos(self._tokenizer.encode(rendered, add_special_tokens=False).ids)
        return self._with_one_bos(self._encode_guarded(rendered, guard))

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether `text` has clearly more than `tokens` tokens. Reads no more of it than it takes to know: tokenizing
        megabytes only to refuse them would cost a hundred times their size in memory."""
        size = 4 * (tokens + _SLACK_TOKENS)
        while size < len(text):
            if len(self._tokenizer.encode(text[:size], add_special_tokens=False)) > tokens + _SLACK_TOKENS:
                return True
            size *= 2
        return False

    def _with_one_bos(self, ids: Sequence[int]) -> tuple[int, ...]:
        twice = self._bos_id is not None and list(ids[:2]) == [self._bos_id, self._bos_id]
        return tuple(ids[1:] if twice else ids)

    def _encode_guarded(self, rendered: str, guard: str) -> list[int]:
        """Special tokens that the template wrote are themselves; those with a guard inside are text."""
        ids: list[int] = []
        for index, piece in enumerate(self._special_pattern.split(rendered)):
            if index % 2:
                ids.append(self._special_ids[piece])
            elif piece:
                ids.extend(self._plain_tokenizer.encode(piece.replace(guard, ""), add_special_tokens=False).ids)
        return ids

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._special.values(), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"([^\s\S])")

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {text: token_id for token_id, text in self._special.items()}

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """A copy that reads special tokens as text (the switch belongs to the whole tokenizer, not to a call)."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    # -- to text ---------------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of `token_ids`; special tokens have none."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one answer."""
        return ByteDetokenizer(self._answer_bytes) if self._byte_level else WindowDetokenizer(self.decode)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes; a special token's name."""
        if token_id in self._special:
            return self._special[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        return _piece_bytes(piece) if self._byte_level else self.decode((token_id,)).encode()

    def token_text(self, token_id: int) -> str:
        """One token as text; parts of a character appear as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _answer_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self.token_bytes(token_id)

    @cached_property
    def _byte_level(self) -> bool:
        return type(self._tokenizer.decoder).__name__ == "ByteLevel"


def _read_directory(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{path.name} has no tokenizer.json")
    settings: dict[str, Any] = {}
    if (config := path / "tokenizer_config.json").is_file():
        settings = json.loads(config.read_text("utf-8"))
    if (template := path / "chat_template.jinja").is_file():
        settings["chat_template"] = template.read_text("utf-8")
    return Tokenizer.from_file(str(file)), settings


def _token_text(value: Any) -> str | None:
    """A special token is written as a string or as an object with `content`."""
    return value.get("content") if isinstance(value, Mapping) else value


def _chat_template(value: Any) -> str | None:
    """One template, or a list of named ones of which `default` is meant."""
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value or None


def _unused_character(messages: Sequence[Mapping[str, Any]]) -> str:
    """A private-use character that occurs in no message."""
    used = set().union(*(part for message in messages for part in (message["role"], message["content"])))
    unused = (character for code in chain(*_PRIVATE_USE) if (character := chr(code)) not in used)
    guard = next(unused, None)
    if guard is None:
        raise InvalidRequest("messages", "hold every private-use character there is")
    return guard


def _guarded(message: Mapping[str, Any], special: re.Pattern[str], guard: str) -> dict[str, Any]:
    """The message with a guard inside every special token's text."""

    def guarded(text: str) -> str:
        return special.sub(lambda match: match[0][:1] + guard + match[0][1:], text)

    return {**message, "role": guarded(message["role"]), "content": guarded(message["content"])}


_BYTE_OF_CHARACTER: dict[str, int] = {}


def _piece_bytes(piece: str) -> bytes:
    """The bytes that a piece of GPT-2's byte-level alphabet stands for; a piece outside of it is plain text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()


def _fill_alphabet() -> None:
    """GPT-2's rule: printable Latin-1 bytes stand for themselves, the others follow from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    _BYTE_OF_CHARACTER.update({chr(byte): byte for byte in printable})
    _BYTE_OF_CHARACTER.update({chr(0x100 + index): byte for index, byte in enumerate(others)})


_fill_alphabet()
