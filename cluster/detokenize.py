"""Token ids back to text as they come, and the search for stop strings in that text.

A *detokenizer* turns ids into the text that became certain with them: never half a character, and all pieces
together equal the whole decode (bytes that are no UTF-8 become U+FFFD). A *stop matcher* passes text on, keeping back
only what may still become a stop string. Both cost O(1) per character and know nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain with these ids."""
        ...

    def flush(self) -> str:
        """What is left at the end, an unfinished character as U+FFFD."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings (GPT-2's byte-level BPE); `token_bytes` gives each one's."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other decoder: decodes a short window of ids again with each new one, and passes on what was added.

    A decoder may treat the first token of a text in its own way (SentencePiece drops its space), so the window always
    begins with ids whose text is out already. Text that ends in U+FFFD may be half a character and waits, but not for
    longer than a character has bytes: after that it is not going to be one.
    """

    _LONGEST_CHARACTER = 4

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._known = 0
        """Ids at the start of the window whose text is out."""
        self._doubts = 0
        """How many ids in a row may have been parts of one character."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        return self._advance(self._grown())

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._grown()
        self._doubts += text.endswith("\ufffd")
        unsure = text.endswith("\ufffd") and self._doubts < self._LONGEST_CHARACTER
        return "" if unsure or not text else self._advance(text)

    def _grown(self) -> str:
        known = self._decode(self._ids[: self._known])
        return self._decode(self._ids)[len(known) :]

    def _advance(self, text: str) -> str:
        """`text` goes out; the last ids stay as the context of the next."""
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._doubts = 0
        return text


@dataclass(frozen=True, slots=True)
class Matched:
    """Text to pass on, and the stop string that was met, if any; nothing follows it."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the earliest end of any stop string (on a tie the one that begins first) in text that comes in pieces.

    `include` adds the stop itself to the text. Each stop has a Knuth-Morris-Pratt automaton (1977), so a
    character costs one amortised step per stop, and what must be kept back is the longest current partial match.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> Matched:
        """Text that no stop string can claim any more, or the end."""
        if not self._stops:
            return Matched(text)
        for position, character in enumerate(text):
            stop = self._step(character)
            if stop is not None:
                seen = self._held + text[: position + 1]
                self._held = ""
                return Matched(seen if self._include else seen[: -len(stop)], stop)
        seen = self._held + text
        safe = len(seen) - max(self._matched)
        self._held = seen[safe:]
        return Matched(seen[:safe])

    def flush(self) -> str:
        """No more text comes: what was held back was no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Feed one character; the longest stop string that it completes."""
        met: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != character:
                length = self._failures[index][length]
            length += stop[length] == character
            if length == len(stop):
                met = stop if met is None or len(stop) > len(met) else met
                length = 0  # the text ends here, whatever follows
            self._matched[index] = length
        return met


def _failure_table(stop: str) -> tuple[int, ...]:
    """Entry n: length of the longest proper border of the first n characters."""
    table = [0, 0]
    border = 0
    for character in stop[1:]:
        while border and stop[border] != character:
            border = table[border]
        border += stop[border] == character
        table.append(border)
    return tuple(table)
