"""Chat templates: messages to prompt text, by the conventions of Hugging Face's `chat_template`.

A template is Jinja, run in an immutable sandbox, with `messages`, `add_generation_prompt`, `tools`, the special tokens
(`bos_token`, …), `raise_exception`, `strftime_now` and a plain-JSON `tojson`. What it refuses (`raise_exception`, a
missing key) is the request's fault and becomes `InvalidRequest("messages", …)`.

Source: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest, ModelError


class ChatTemplate:
    """A compiled template. ModelError when it does not parse."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text for these messages (`role`, `content`)."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error.message}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest("messages", f"the chat template fails on them ({type(error).__name__})") from error


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 looks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """JSON as is; jinja2's own filter escapes for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
