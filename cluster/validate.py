"""From what a client asked to requests that can be served, or a refusal that names the field as the client wrote it.

Both front ends turn their own shape (JSON, protobuf) into one `Ask`. `requests_for` makes the engine's frozen
`Request`s of it, one for each prompt: its `n` answers are sequences of one request. The rules for numbers are the
engine's (`engine.validate`); here are the ones about the ask as a whole. Nothing here does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from cluster.config import SlaClass
from engine.errors import InvalidRequest, TandemError
from engine.types import Branching, Request, SamplingParams
from engine.validate import MOST_SEQUENCES, check_fits, check_range, validate, validate_branching
from tandem.messages import Code

MOST_STOPS = 64
MOST_TIMEOUT_S = 30 * 86_400.0
"""What a longer timeout counts as. The clocks between processes know no "for ever" (1e300 s was in the past)."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_SEED_MASK = (1 << 63) - 1

Messages = tuple[Mapping[str, str], ...]


class RequestFailed(TandemError):
    """A request ends without its answer. `param` is the field at fault, when one is."""

    def __init__(self, code: Code, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the registered workers can serve. `kv_tokens`: capacity of the largest decode pool, in tokens."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client asked for, in whichever way it came. None: not given.

    `prompts` holds texts, token ids, or (for a chat) one conversation in `messages`. `max_tokens` None means the
    default of `sampling`, or with `fill_context` as many as fit. `n` to `early_stopping` are those of
    `engine.types.Branching`. `names` says what the client calls our fields.
    """

    model: str = ""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: Messages | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    fill_context: bool = False
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float | None = None
    early_stopping: str | None = None
    include_stop: bool = False
    request_id: str = ""
    sla_class: str = ""
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def branching(self) -> Branching | None:
        """None when one sequence is all there is to it."""
        given = {"length_penalty": self.length_penalty, "early_stopping": self.early_stopping}
        best_of = None if self.best_of == self.n else self.best_of
        if self.n == 1 and best_of is None and not self.beam_width:
            return None
        return Branching(
            n=self.n,
            best_of=best_of,
            beam_width=self.beam_width,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    @property
    def sequences(self) -> int:
        """Sequences that run at once."""
        return max(1, len(self.prompts)) * (1 if self.branching is None else self.branching.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the gateway adds to an ask: its id, seed, arrival (monotonic seconds) and the class it fell into."""

    request_id: str
    seed: int
    arrival_s: float
    model: str
    class_name: str
    sla: SlaClass


def check_ask(ask: Ask) -> None:
    """What can be said before any tokenizing. InvalidRequest names the field."""
    if ask.messages is not None:
        _check_messages(ask.messages)
    elif not ask.prompts or not all(ask.prompts):
        raise InvalidRequest("prompt", "must not be empty")
    _check_branching(ask)
    if len(ask.sampling.stop) > MOST_STOPS:
        raise InvalidRequest("stop", f"holds {len(ask.sampling.stop)} strings; at most {MOST_STOPS} are allowed")
    if ask.cache_salt == "":
        raise InvalidRequest("cache_salt", "is empty; leave it out to share the cache with everybody")
    if ask.request_id and not _REQUEST_ID.fullmatch(ask.request_id):
        raise InvalidRequest("request_id", "must be 1 to 64 letters, digits and any of . _ : -")
    if ask.timeout_s is not None and not (isfinite(ask.timeout_s) and ask.timeout_s > 0):
        raise InvalidRequest("timeout_s", f"is {ask.timeout_s}; it must be a positive number of seconds")
    for name in ("seed", "priority"):
        value = getattr(ask, name)
        if value is not None and not -(1 << 63) <= value < 1 << 63:
            raise InvalidRequest(name, "does not fit 64 bits")


def _check_branching(ask: Ask) -> None:
    for name in ("length_penalty", "early_stopping"):
        if getattr(ask, name) is not None and not ask.beam_width:
            raise InvalidRequest(name, "is only for beam search")
    try:
        check_range("n", ask.n, 1, MOST_SEQUENCES)
        if ask.branching is not None:
            validate_branching(ask.branching, ask.sampling)
    except InvalidRequest as error:
        raise InvalidRequest(_client_name(error.field, ask), error.message) from error


def _check_messages(messages: Messages) -> None:
    if not messages:
        raise InvalidRequest("messages", "must not be empty")
    for index, message in enumerate(messages):
        if message["role"] == "user" and not message["content"]:
            raise InvalidRequest(f"messages.{index}.content", "must not be empty")


def pick_class(name: str, classes: Mapping[str, Any], default: str) -> str:
    """The name of the SLA class; InvalidRequest for one that the SLA file does not have."""
    chosen = name or default
    if chosen not in classes:
        raise InvalidRequest("sla_class", "is unknown; it must be one of " + ", ".join(sorted(classes)))
    return chosen


def requests_for(
    ask: Ask, prompts: Sequence[tuple[int, ...]], given: Given, limits: ModelLimits
) -> tuple[Request, ...]:
    """One request for each prompt. InvalidRequest names the field."""
    try:
        return tuple(
            _request(ask, prompt, given, limits, f"{given.request_id}-{index}" if len(prompts) > 1 else "")
            for index, prompt in enumerate(prompts)
        )
    except InvalidRequest as error:
        raise InvalidRequest(_client_name(error.field, ask), error.message) from error


def _request(ask: Ask, prompt: tuple[int, ...], given: Given, limits: ModelLimits, request_id: str) -> Request:
    request = Request(
        request_id=request_id or given.request_id,
        token_ids=prompt,
        sampling=replace(
            ask.sampling,
            max_tokens=_max_tokens(ask, len(prompt), limits),
            top_k=min(ask.sampling.top_k, limits.vocab_size),  # the same choice, and it fits the 64 bits of a message
            seed=given.seed & _SEED_MASK,
        ),
        model=given.model,
        sla_class=given.class_name,
        priority=given.sla.priority if ask.priority is None else ask.priority,
        ttft_s=given.sla.ttft_s if ask.ttft_s is None else ask.ttft_s,
        itl_s=given.sla.itl_s if ask.itl_s is None else ask.itl_s,
        arrival_s=given.arrival_s,
        deadline_s=given.arrival_s + min(_timeout_s(ask, given.sla), MOST_TIMEOUT_S),
        cache_salt=ask.cache_salt or "",
        branching=ask.branching,
    )
    validate(request, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
    check_fits(request, limits.kv_tokens, "the KV pool")
    return request


def _timeout_s(ask: Ask, sla: SlaClass) -> float:
    return sla.timeout_s if ask.timeout_s is None else ask.timeout_s


def _max_tokens(ask: Ask, prompt_tokens: int, limits: ModelLimits) -> int:
    if ask.max_tokens is not None:
        return ask.max_tokens
    if ask.fill_context:
        return max(1, min(limits.max_model_len, limits.kv_tokens) - prompt_tokens)
    return ask.sampling.max_tokens


def _client_name(field_name: str, ask: Ask) -> str:
    if field_name == "token_ids":
        return "prompt" if ask.messages is None else "messages"
    return ask.names.get(field_name, field_name)
