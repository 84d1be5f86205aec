"""The bodies of requests in the OpenAI-style API, as pydantic models, each of which turns into an `Ask`.

Fields of OpenAI's that change nothing here are accepted and not used; those that would change the answer
and that we do not have (`suffix`, `tools`, …) are refused by name, and so is every field that nobody documents:
nothing internal (`kv_transfer_params` and its kind) can come in from outside. Fields of our own: `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `include_stop`, `sla_class`, `priority`,
`cache_salt`, `timeout_s`, `ttft_s`, `itl_s`, and for beam search (names as in vLLM) `use_beam_search`, `beam_width` (or
`best_of`; else `n`), `length_penalty`, `early_stopping`. Beams, and `best_of` above `n`, are known at the end only, so
they are refused with `stream`.

Source: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.validate import Ask
from engine.errors import InvalidRequest
from engine.types import SamplingParams

MOST_PROMPTS = 1024


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(BaseModel):
    """What both kinds of completion share. None: not given."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are accepted only with one of these values (or null)."""
    NAMES: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop: bool | None = None
    sla_class: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None

    # OpenAI's, not used here
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_supported(self) -> None:
        for name, allowed in self.UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise InvalidRequest(name, "is not supported")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "is only for stream=true")

    def sampling(self, *, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's parameters; `max_tokens` and `seed` are left to the gateway when they are not given."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_logit_bias(self.logit_bias or {}),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def branching(self) -> dict[str, Any]:
        """The parts of an `Ask` about several answers."""
        n = 1 if self.n is None else self.n
        if self.use_beam_search:
            return {"n": n, **self._beams(n)}
        for name in _BEAMS:
            if getattr(self, name) is not None:
                raise InvalidRequest(name, "is only for use_beam_search=true")
        if self.stream and self.best_of is not None and self.best_of != n:
            raise InvalidRequest("best_of", "must equal n for stream=true: the best are known at the end only")
        return {"n": n, "best_of": self.best_of}

    def _beams(self, n: int) -> dict[str, Any]:
        if self.stream:
            raise InvalidRequest("use_beam_search", "is not for stream=true: beams are known at the end only")
        if self.beam_width is not None and self.best_of is not None:
            raise InvalidRequest(
                "best_of", "is another name for beam_width with use_beam_search=true; give one of them"
            )
        width = next((width for width in (self.beam_width, self.best_of) if width is not None), n)
        if width < 1:
            name = "best_of" if self.beam_width is None else "beam_width"
            raise InvalidRequest(name, f"is {width}; it must be at least 1")
        if self.early_stopping not in _EARLY_STOPPING:
            raise InvalidRequest("early_stopping", 'must be true, false or "never"')
        return {
            "beam_width": width,
            "length_penalty": self.length_penalty,
            "early_stopping": _EARLY_STOPPING[self.early_stopping],
        }

    def common(self) -> dict[str, Any]:
        """The parts of an `Ask` that are the same for both kinds."""
        names = {"beam_width": "n" if self.best_of is None else "best_of"} if self.beam_width is None else {}
        return {
            **self.branching(),
            "model": self.model or "",
            "seed": self.seed,
            "include_stop": bool(self.include_stop),
            "sla_class": self.sla_class or "",
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "timeout_s": self.timeout_s,
            "ttft_s": self.ttft_s,
            "itl_s": self.itl_s,
            "names": {**self.NAMES, **names},
        }


_BEAMS = ("beam_width", "length_penalty", "early_stopping")
_EARLY_STOPPING: Mapping[bool | str | None, str | None] = {None: None, True: "yes", False: "no", "never": "never"}
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


class CompletionBody(_Body):
    """POST /v1/completions."""

    UNSUPPORTED = {"suffix": ("",)}
    NAMES = {"prompt_logprobs": "logprobs"}

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None

    def ask(self) -> Ask:
        """InvalidRequest names the field."""
        self.check_supported()
        prompt_logprobs = self.logprobs if self.echo else None
        return Ask(
            prompts=_prompts(self.prompt),
            sampling=self.sampling(logprobs=self.logprobs, prompt_logprobs=prompt_logprobs),
            max_tokens=self.max_tokens,
            **self.common(),
        )


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: str | list[ContentPart]
    name: str | None = None

    # What an answer that is sent back as it came has besides; with a value they would change the prompt.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None

    def as_text(self, index: int) -> dict[str, str]:
        """Role and content, text parts joined by line ends; the template sees nothing else."""
        for name in ("refusal", "annotations", "audio", "tool_calls", "function_call"):
            if getattr(self, name):
                raise InvalidRequest(f"messages.{index}.{name}", "is not supported")
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        if any(part.type != "text" for part in self.content):
            raise InvalidRequest(f"messages.{index}.content", "only parts of type text are supported")
        return {"role": self.role, "content": "\n".join(part.text for part in self.content)}


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    UNSUPPORTED = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    # OpenAI's, not used here
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None

    def ask(self) -> Ask:
        """InvalidRequest names the field."""
        self.check_supported()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only for logprobs=true")
        newer = self.max_completion_tokens is not None
        names = {"logprobs": "logprobs" if self.top_logprobs is None else "top_logprobs"} | (
            {"max_tokens": "max_completion_tokens"} if newer else {}
        )
        common = self.common()
        return Ask(
            messages=tuple(message.as_text(index) for index, message in enumerate(self.messages)),
            sampling=self.sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None, prompt_logprobs=None),
            max_tokens=self.max_completion_tokens if newer else self.max_tokens,
            fill_context=True,
            **(common | {"names": common["names"] | names}),
        )


class TokenizeBody(BaseModel):
    """POST /tokenize: the ids that a completion (`prompt`) or a chat (`messages`) would begin with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: Any = None
    messages: list[ChatMessage] | None = None

    def ask(self) -> Ask:
        if self.messages is not None and self.prompt is not None:
            raise InvalidRequest("prompt", "give either prompt or messages")
        if self.messages is not None:
            messages = tuple(message.as_text(index) for index, message in enumerate(self.messages))
            return Ask(model=self.model or "", messages=messages)
        return Ask(model=self.model or "", prompts=_prompts(self.prompt))


def invalid(error: ValidationError) -> InvalidRequest:
    """The first complaint of pydantic, without the value at fault (it may be a secret, or large)."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    if first["type"] == "extra_forbidden":
        return InvalidRequest(_path(first["loc"]), "is not a field of this API")
    return InvalidRequest(_path(first["loc"]), first["msg"][:1].lower() + first["msg"][1:])


def _path(location: Sequence[int | str]) -> str:
    """Field and index as `messages.0.content`; names of pydantic's alternatives left out."""
    names = [
        part for part in map(str, location) if part.replace("_", "").isalnum() and part not in ("str", "int", "bool")
    ]
    return ".".join(names)[:80] or "body"


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", "must be a string, a list of strings, token ids, or a list of token ids")
    if not prompt:
        raise InvalidRequest("prompt", "must not be empty")
    if type(prompt[0]) is int:
        return (_token_ids(prompt),)
    if len(prompt) > MOST_PROMPTS:
        raise InvalidRequest("prompt", f"holds {len(prompt)} prompts; at most {MOST_PROMPTS} are allowed")
    if isinstance(prompt[0], str) and all(isinstance(one, str) for one in prompt):
        return tuple(prompt)
    return tuple(_token_ids(one) for one in prompt)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token_id) is int for token_id in value):
        raise InvalidRequest("prompt", "token ids must be lists of whole numbers, and not mixed with strings")
    return tuple(value)


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(key), value) for key, value in bias.items())
    except ValueError:
        raise InvalidRequest("logit_bias", "its keys must be token ids") from None
