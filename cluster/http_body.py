"""Reading a JSON body that may be anything, and noticing that its sender has left.

Accepted is a JSON object in UTF-8, as RFC 8259 writes it, up to a size limit: no byte-order mark, no NaN, no key
twice, no half of a surrogate pair. Everything else is refused with a status and a message, never with a 500.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive

from engine.errors import InvalidRequest

T = TypeVar("T")

_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as a dict. HTTPException 413 or 415, InvalidRequest (`body` or a field) for the rest."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise HTTPException(415, "the content type must be application/json")
    if "charset" in parameters.lower() and "utf-8" not in parameters.lower():
        raise HTTPException(415, "the charset must be utf-8")
    return parse_json(await _read(request, limit_bytes))


def parse_json(raw: bytes) -> dict[str, Any]:
    """InvalidRequest says what is wrong, and nothing of what was sent."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise InvalidRequest("body", f"is not JSON: line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise InvalidRequest("body", "is not UTF-8") from None
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    except ValueError:  # int() refuses thousands of digits
        raise InvalidRequest("body", "holds a number that is too long") from None
    if not isinstance(value, dict):
        raise InvalidRequest("body", "must be a JSON object")
    if _HALF_PAIR.search(raw):
        _no_half_pairs(value)
    return value


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T | None:
    """The result of `work`, or None (and `work` cancelled, and over) when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, limit_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = HTTPException(413, f"the body is larger than {limit_bytes} bytes")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _no_constant(name: str) -> None:
    raise InvalidRequest("body", f"is not JSON: {name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InvalidRequest("body", "has a key twice in one object")
    return value


def _no_half_pairs(body: dict[str, Any]) -> None:
    for name, value in body.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            field = name if name.isidentifier() and name.isascii() else "body"
            raise InvalidRequest(field, "holds half of a surrogate pair, which is no text") from None
