"""The bodies of answers in the OpenAI-style API: plain dicts, whole and in chunks.

The two kinds of completion differ only in how a choice looks, so each is a small *shape*: `CompletionShape` and
`ChatShape`. `Collected` gathers the pieces of one answer for those who do not stream. The last chunk and every whole
answer carry a field of our own, `tandem`: who served it and how long each part took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.gateway import Piece
from cluster.outcome import Outcome
from cluster.text import Text
from engine.types import FinishReason, Token

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


@dataclass(slots=True)
class Collected:
    """All pieces of one answer together."""

    parts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    outcome: Outcome | None = None
    score: float | None = None

    def add(self, piece: Piece) -> None:
        self.parts.append(piece.text)
        self.tokens.extend(piece.tokens)
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.finish = piece.finish or self.finish
        self.outcome = piece.outcome or self.outcome
        self.score = self.score if piece.score is None else piece.score


class Shape(Protocol):
    """How choices look."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk's choice before anything is known, if there is one."""
        ...

    def piece(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """A chunk's choice; None when there is nothing to say."""
        ...

    def whole(self, index: int, answer: Collected) -> dict[str, Any]: ...


class CompletionShape:
    """`echo[i]` is put before answer i: the prompt's text, or nothing."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, text: Text, logprobs: bool, echo: Sequence[str]) -> None:
        self._text = text
        self._logprobs = [_Offsets(text) for _ in echo] if logprobs else None
        self._echo = list(echo)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, index: int, piece: Piece) -> dict[str, Any] | None:
        text = self._echo[index] + piece.text
        self._echo[index] = ""
        return self._choice(index, text, (*piece.prompt_logprobs, *piece.tokens), piece.finish)

    def whole(self, index: int, answer: Collected) -> dict[str, Any]:
        text = self._echo[index] + "".join(answer.parts)
        choice = self._choice(index, text, (*answer.prompt_logprobs, *answer.tokens), answer.finish)
        assert choice is not None
        return choice

    def _choice(
        self, index: int, text: str, tokens: Sequence[Token], finish: FinishReason | None
    ) -> dict[str, Any] | None:
        logprobs = self._logprobs[index].body(tokens) if self._logprobs else None
        if not text and not finish and not (logprobs and tokens):
            return None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class ChatShape:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, text: Text, logprobs: bool) -> None:
        self._text = text
        self._logprobs = logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, piece: Piece) -> dict[str, Any] | None:
        logprobs = self._body(piece.tokens)
        if not piece.text and not piece.finish and not logprobs:
            return None
        delta = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish}

    def whole(self, index: int, answer: Collected) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(answer.parts), "refusal": None}
        logprobs = self._body(answer.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}

    def _body(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs or not tokens:
            return None
        return {"content": [self._token(token) for token in tokens], "refusal": None}

    def _token(self, token: Token) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
        return self._entry(token.token_id, token.logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._text.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class _Offsets:
    """The `logprobs` of a text completion, with text offsets that run on over the chunks."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._offset = 0

    def body(self, tokens: Sequence[Token]) -> dict[str, Any]:
        texts = [self._text.token_text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float | None] | None:
        """The best tokens and the chosen one; of two with the same text the better counts."""
        if token.logprob is None:
            return None
        best: dict[str, float | None] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            best.setdefault(self._text.token_text(token_id), _finite(logprob))
        return best


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage_body(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Token counts over all requests; a prompt with several answers counts once."""
    prompt_tokens = sum(outcome.prompt_tokens for outcome in outcomes)
    completion_tokens = sum(outcome.completion_tokens for outcome in outcomes)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(outcome.cached_tokens for outcome in outcomes)},
    }


def served_by(outcome: Outcome, seed: int) -> dict[str, Any]:
    """The `tandem` field; durations in seconds."""
    report = outcome.report
    return {
        "request_id": outcome.request_id,
        "prefill": outcome.prefill,
        "decode": outcome.decode,
        "transport": report.transport,
        "kv_bytes": report.kv_bytes,
        "kv_blocks": report.kv_blocks,
        "prefill_cached_tokens": report.prefill_cached_tokens,
        "fetched_tokens": report.fetched_tokens,
        "decode_held_tokens": report.decode_held_tokens,
        "queue_s": report.queue_s,
        "prefill_s": report.prefill_s,
        "transfer_s": report.transfer_s,
        "exposed_s": report.exposed_s,
        "ttft_s": outcome.ttft_s,
        "total_s": outcome.e2e_s,
        "attempts": outcome.attempts,
        "placement": outcome.placement_reason,
        "seed": seed,
    }
