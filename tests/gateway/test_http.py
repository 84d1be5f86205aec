"""The OpenAI-style API over HTTP, on the application itself (no socket)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from scripted import IMPATIENT, NOBODY, REPORT, Bench, ScriptedRouter, bench, ids, toy_text, until, worker

from cluster.http_server import HttpSettings, build_app
from tandem.messages import Code, Declined, Expect

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(*, http: HttpSettings | None = None, **kwargs: Any) -> AsyncIterator[tuple[Bench, httpx.AsyncClient]]:
    async with bench(**kwargs) as made:
        app = build_app(made.gateway, http or HttpSettings(wall_clock=lambda: 1_000.0))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tandem", timeout=5) as client:
            yield made, client


def _error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The response is this error, in OpenAI's shape and nothing else."""
    assert response.status_code == status, response.text
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} in {response.text}"))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    if param is not None:
        assert body["error"]["param"] == param
    return dict(body["error"])


def _events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def _still_works(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 5})
    assert response.json()["choices"][0]["text"] == "Hello"


# -- answers ------------------------------------------------------------------------------------------------------


async def test_a_completion_has_text_usage_and_who_served_it() -> None:
    async with served() as (_, client):
        response = await client.post(COMPLETIONS, json={"model": "toy", "prompt": "hello", "max_tokens": 5, "seed": 3})
        body = response.json()
        assert response.status_code == 200
        assert (body["id"], body["object"], body["created"], body["model"]) == (
            "cmpl-r0",
            "text_completion",
            1000,
            "toy",
        )
        assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        assert (body["tandem"]["prefill"], body["tandem"]["decode"]) == ("prefill-0", "decode-0")
        assert (body["tandem"]["kv_bytes"], body["tandem"]["seed"]) == (REPORT.kv_bytes, 3)
        assert response.headers["tandem-decode"] == "decode-0"


async def test_a_streamed_completion_says_the_same_as_a_whole_one() -> None:
    async with served() as (_made, client):
        asked = {"prompt": "hello", "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = _events(await client.post(COMPLETIONS, json=asked))
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello, world"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 11 + ["length"]
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert chunks[-1]["tandem"]["decode"] == "decode-0"
        assert {chunk["id"] for chunk in chunks} == {"cmpl-r0"}


async def test_a_chat_completion_streams_a_role_then_text_then_its_end() -> None:
    async with served() as (made, client):
        whole = (await client.post(CHAT, json=HI)).json()
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hello, world", "refusal": None}
        assert whole["choices"][0]["finish_reason"] == "stop"
        *chunks, done = _events(await client.post(CHAT, json=HI | {"stream": True}))
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
        assert "".join(delta.get("content", "") for delta in deltas) == "Hello, world"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert made.outcomes[0].completion_tokens == made.outcomes[1].completion_tokens == 12


async def test_content_may_come_in_text_parts() -> None:
    async with served() as (made, client):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        response = await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
        assert response.status_code == 200
        expect = next(question for _, question in made.workers.asked if isinstance(question, Expect))
        assert bytes(token for token in expect.request.token_ids if token < 256).startswith(b"user\na\nb")
        picture = [{"type": "image_url", "text": "x"}]
        _error(
            await client.post(CHAT, json={"messages": [{"role": "user", "content": picture}]}),
            400,
            "messages.0.content",
        )


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [104, 101], [[104, 101]]])
async def test_a_prompt_comes_as_text_texts_ids_or_lists_of_ids(prompt: Any) -> None:
    async with served() as (_, client):
        response = await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 5})
        assert [choice["text"] for choice in response.json()["choices"]] == ["Hello"]


@pytest.mark.parametrize("stream", [True, False])
async def test_several_prompts_and_answers_have_an_index_each(stream: bool) -> None:
    async with served() as (_, client):
        asked = {"prompt": ["aa", "bbb"], "n": 2, "max_tokens": 2, "stream": stream}
        response = await client.post(COMPLETIONS, json=asked)
        texts = ["", "", "", ""]
        bodies = _events(response)[:-1] if stream else [response.json()]
        for choice in (choice for body in bodies for choice in body["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == ["He"] * 4
        if not stream:
            assert bodies[0]["usage"]["prompt_tokens"] == 5
            assert bodies[0]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_with_logprobs_has_an_entry_for_every_token(stream: bool) -> None:
    async with served() as (_made, client):
        asked = {"prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 2, "stream": stream}
        response = await client.post(COMPLETIONS, json=asked)
        choices = [body["choices"][0] for body in (_events(response)[:-1] if stream else [response.json()])]
        assert "".join(choice["text"] for choice in choices) == "helloHe"
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        logprobs = [logprob for choice in choices for logprob in choice["logprobs"]["token_logprobs"]]
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert tokens == list("helloHe")
        assert logprobs == [None, -1.0, -1.0, -1.0, -1.0, -0.5, -0.5]
        assert offsets == list(range(7))
        assert choices[-1]["logprobs"]["top_logprobs"][-1] == {"\x00": -2.0, "\x01": -3.0, "e": -0.5}


async def test_chat_logprobs_name_tokens_bytes_and_the_best_ones() -> None:
    async with served() as (made, client):
        made.workers.reply = lambda request: [0xE2]
        response = await client.post(CHAT, json=HI | {"logprobs": True, "top_logprobs": 1})
        (entry,) = response.json()["choices"][0]["logprobs"]["content"]
        assert entry == {
            "token": "\ufffd",
            "logprob": -0.5,
            "bytes": [0xE2],
            "top_logprobs": [{"token": "\x00", "logprob": -2.0, "bytes": [0]}],
        }


async def test_an_infinite_logprob_is_still_json() -> None:
    async with served() as (made, client):
        from engine.types import Token

        made.workers._tokens = lambda request: [Token(65, float("-inf"), ((66, float("-inf")),))]  # type: ignore[method-assign]
        response = await client.post(COMPLETIONS, json={"prompt": "a", "logprobs": 1})
        assert json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
        assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_our_own_fields_reach_the_request() -> None:
    async with served() as (made, client):
        asked = {
            "prompt": "a",
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [7],
            "logit_bias": {"65": 1},
            "sla_class": "fast",
            "priority": 9,
            "cache_salt": "s",
            "timeout_s": 3,
            "stop": ["lo", "x"],
            "include_stop": True,
        }
        response = await client.post(COMPLETIONS, json=asked)
        assert response.json()["choices"][0]["text"] == "Hello"
        request = next(question.request for _, question in made.workers.asked if isinstance(question, Expect))
        assert (request.sampling.top_k, request.sampling.min_p, request.sampling.repetition_penalty) == (5, 0.1, 1.1)
        assert (request.sampling.min_tokens, request.sampling.ignore_eos) == (1, True)
        assert (request.sampling.stop_token_ids, request.sampling.logit_bias) == ((7,), ((65, 1.0),))
        assert (request.sla_class, request.priority, request.cache_salt) == ("fast", 9, "s")
        assert request.deadline_s == request.arrival_s + 3


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, ["a", ""], [[1], []]])
async def test_an_empty_prompt_is_refused_in_every_form(prompt: Any) -> None:
    async with served() as (_, client):
        _error(await client.post(COMPLETIONS, json={"prompt": prompt}), 400, "prompt")
        await _still_works(client)


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": ""}]])
async def test_an_empty_chat_is_refused(messages: Any) -> None:
    async with served() as (_, client):
        assert _error(await client.post(CHAT, json={"messages": messages}), 400)["param"].startswith("messages")


@pytest.mark.parametrize("token_id", [-1, 512, 612, 2**31, 2**63])
@pytest.mark.parametrize("stream", [True, False])
async def test_token_ids_out_of_range_are_refused_by_field(token_id: int, stream: bool) -> None:
    async with served() as (made, client):
        made.workers.hold = True
        neighbour = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 5}))
        await until(lambda: bool(made.workers.running))
        for field, value in [
            ("prompt", [1, token_id]),
            ("prompt", [[token_id]]),
            ("stop_token_ids", [token_id]),
            ("logit_bias", {str(token_id): 1.0}),
        ]:
            body = {"prompt": "a", "stream": stream, field: value}
            error = _error(await client.post(COMPLETIONS, json=body), 400, field)
            assert field in error["message"]
        made.workers.go.set()
        assert (await neighbour).json()["choices"][0]["text"] == "Hello"


RAW_NUMBERS = ("NaN", "Infinity", "-Infinity", '"NaN"', "-1", "1e999", "1e9", "true", "[]")


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("raw", RAW_NUMBERS)
async def test_numbers_that_are_none_or_out_of_range_are_refused_with_valid_json(field: str, raw: str) -> None:
    async with served() as (_, client):
        content = f'{{"prompt": "a", "{field}": {raw}}}'
        response = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        assert _error(response, 400)["param"] in (field, "body")
        await _still_works(client)


@pytest.mark.parametrize(("field", "value"), [("temperature", 1e-9), ("top_k", -1), ("top_k", 0), ("top_k", 10**7)])
async def test_numbers_at_the_edge_are_served(field: str, value: float) -> None:
    async with served() as (_, client):
        response = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5, field: value})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "kv_transfer_params": {"remote_host": "127.0.0.1"}}, "kv_transfer_params"),
        ({"prompt": "a", "do_remote_decode": True}, "do_remote_decode"),
        ({"prompt": "a", "data_parallel_rank": 1}, "data_parallel_rank"),
        ({"prompt": "a", "suffix": "x"}, "suffix"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": "a", "stop": [1]}, None),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 1e3}}, "logit_bias"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ({"prompt": "a", "seed": 10**30}, "seed"),
        ({"prompt": "a", "min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "sla_class": "gold"}, "sla_class"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": [1] * 600}, "prompt"),
        ({"prompt": "a", "max_tokens": 600}, "max_tokens"),
        ({}, "prompt"),
    ],
)
async def test_a_bad_completion_is_refused_by_field(body: dict[str, Any], param: str | None) -> None:
    async with served() as (made, client):
        _error(await client.post(COMPLETIONS, json=body), 400, param)
        assert not made.workers.asked
        assert made.refused == [Code.INVALID]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, None),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
)
async def test_a_bad_chat_is_refused_by_field(extra: dict[str, Any], param: str | None) -> None:
    async with served() as (_, client):
        _error(await client.post(CHAT, json=HI | extra), 400, param)


async def test_openais_fields_that_change_nothing_are_accepted() -> None:
    async with served() as (_, client):
        unused = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "tool_choice": "none"}
        extra = unused | {"response_format": {"type": "text"}, "tools": None, "n": None, "temperature": None}
        assert (await client.post(CHAT, json=HI | extra)).status_code == 200


async def test_an_answer_may_be_sent_back_as_it_came_for_the_next_turn() -> None:
    async with served() as (_, client):
        said = (await client.post(CHAT, json=HI)).json()["choices"][0]["message"]
        sdk = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
        for answer in (said, said | sdk):
            turn = {"messages": [*HI["messages"], answer, {"role": "user", "content": "and?"}]}
            assert (await client.post(CHAT, json=turn)).status_code == 200
        call = {"messages": [*HI["messages"], said | {"tool_calls": [{"id": "1"}]}]}
        _error(await client.post(CHAT, json=call), 400, "messages.1.tool_calls")


MALFORMED = {
    "broken": b'{"prompt": "a"',
    "list": b"[]",
    "string": b'"x"',
    "null": b"null",
    "empty": b"",
    "byte-order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "nesting": b'{"prompt": ' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    "duplicate key": b'{"prompt": "a", "prompt": "b"}',
    "digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "surrogate": b'{"prompt": "\\ud83d"}',
    "surrogate in a list": b'{"prompt": "a", "stop": ["\\udc00"]}',
    "surrogate in a name": b'{"prompt": "a", "\\ud83d": 1}',
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_body_is_a_400_and_the_connection_goes_on(name: str) -> None:
    async with served() as (made, client):
        response = await client.post(COMPLETIONS, content=MALFORMED[name], headers={"content-type": "application/json"})
        _error(response, 400)
        assert made.refused == [Code.INVALID]
        await _still_works(client)


async def test_a_whole_surrogate_pair_is_text() -> None:
    async with served() as (made, client):
        content = b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}'
        response = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        assert response.status_code == 200
        request = next(question.request for _, question in made.workers.asked if isinstance(question, Expect))
        assert list(request.token_ids) == ids("😀")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=latin-1"]
)
async def test_another_content_type_is_refused(content_type: str) -> None:
    async with served() as (_, client):
        _error(await client.post(COMPLETIONS, content=b"{}", headers={"content-type": content_type}), 415)


async def test_wrong_paths_and_methods_have_openais_error_too() -> None:
    async with served() as (_, client):
        assert _error(await client.get("/v1/nothing"), 404)["code"] == "not_found"
        assert _error(await client.get(COMPLETIONS), 405)["code"] == "method_not_allowed"
        _error(await client.post("/v1/models", json={}), 405)
        _error(await client.post(COMPLETIONS + "/", json={}), 404)
        assert (await client.request("OPTIONS", COMPLETIONS)).status_code == 405
        assert (await client.head("/v1/models")).status_code == 200


@pytest.mark.parametrize("model", ["other", "toy ", "to y", "x" * 100_000])
async def test_an_unknown_model_is_a_404(model: str) -> None:
    async with served() as (_, client):
        error = _error(await client.post(CHAT, json=HI | {"model": model}), 404, "model")
        assert error["code"] == "model_not_found"
        assert len(error["message"]) < 200
        assert _error(await client.get("/v1/models/other"), 404)["code"] == "model_not_found"


async def test_a_body_above_the_limit_is_a_413_however_it_comes() -> None:
    async with served(http=HttpSettings(max_body_bytes=1000)) as (_, client):
        _error(await client.post(COMPLETIONS, json={"prompt": "x" * 2000}), 413)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        response = await client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
        _error(response, 413)
        await _still_works(client)


async def test_five_mebibytes_of_token_ids_are_read_and_counted() -> None:
    roomy = {"total_blocks": 10**6, "max_model_len": 10**7}
    router = ScriptedRouter(infos=(worker("p", "prefill", **roomy), worker("d", "decode", **roomy)))
    async with served(router=router) as (_made, client):
        response = await client.post(COMPLETIONS, json={"prompt": [100] * 1_100_000, "max_tokens": 1})
        assert response.json()["usage"]["prompt_tokens"] == 1_100_000


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (Code.INVALID, 400, "invalid_request_error"),
        (Code.NO_ROOM, 504, "timeout_error"),
        (Code.UNAVAILABLE, 503, "server_error"),
        (Code.DEADLINE, 504, "timeout_error"),
        (Code.INTERNAL, 500, "server_error"),
        (Code.MISMATCH, 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_fails_before_the_first_token_has_its_own_status(
    code: Code, status: int, kind: str, stream: bool
) -> None:
    async with served() as (made, client):
        made.workers.declines["decode-0", Expect] = [Declined(code, "no")] * 1000
        asked = {"prompt": "a", "stream": stream, "timeout_s": 0.05 if status == 504 else 5.0}
        assert _error(await client.post(COMPLETIONS, json=asked), status)["type"] == kind


async def test_what_fails_after_the_first_token_ends_the_stream_with_an_error_and_no_done() -> None:
    async with served(limits=IMPATIENT) as (made, client):
        made.workers.hold = True
        asking = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "stream": True}))
        await until(lambda: bool(made.workers.running))
        await until(lambda: "r0" in made.dispatch._flights and made.dispatch._flights["r0"].tokens == 1)
        made.router.refusal = NOBODY
        made.hub.lost("decode-0", "1", "killed")
        first, last = _events(await asking)
        assert first["choices"][0]["text"] == "H"
        assert last["error"]["code"] == "unavailable"


async def test_a_limit_on_running_answers_is_a_429_and_draining_a_503() -> None:
    async with served(max_streams=0) as (_, client):
        response = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert _error(response, 429)["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
    async with served() as (made, client):
        assert await made.gateway.drain(1.0)
        _error(await client.post(COMPLETIONS, json={"prompt": "a"}), 503)
        assert (await client.get("/health")).status_code == 200
        assert _error(await client.get("/ready"), 503)["message"] == "draining"


async def test_a_bug_is_a_500_without_its_story() -> None:
    async with served() as (made, client):

        async def broken(ask: object) -> None:
            raise RuntimeError("canary /srv/secret")

        made.gateway.prepare = broken  # type: ignore[method-assign, assignment]
        response = await client.post(COMPLETIONS, json={"prompt": "a"})
        _error(response, 500)
        assert "canary" not in response.text


# -- clients that leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("silent", [True, False])
async def test_a_client_that_leaves_aborts_its_request_at_once(stream: bool, silent: bool) -> None:
    """`silent`: before the first token."""
    async with bench() as made:
        made.workers.hold, made.workers.silent = True, silent
        app = build_app(made.gateway, HttpSettings())
        gone = asyncio.Event()
        body = json.dumps({"prompt": "a", "stream": stream}).encode()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None: ...

        scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        call = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
        await until(lambda: "r0" in made.workers.running)
        if not silent:
            await until(lambda: made.dispatch._flights["r0"].tokens == 1)
        gone.set()
        await asyncio.wait_for(call, 1)
        await asyncio.wait_for(made.dispatch.drained(), 1)
        assert "r0" in made.workers.aborted
        assert [outcome.code for outcome in made.outcomes] == [Code.ABORTED]


# -- the other routes ---------------------------------------------------------------------------------------------


async def test_models_health_readiness_metrics_and_tokenize() -> None:
    metrics = HttpSettings(metrics=lambda: (b"tandem_x 1\n", "text/plain; version=0.0.4; charset=utf-8"))
    async with served(http=metrics) as (_, client):
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 512)
        assert (await client.get("/v1/models/toy")).json() == model
        assert (await client.get("/ready")).json() == {"status": "ready"}
        exposed = await client.get("/metrics")
        assert exposed.text == "tandem_x 1\n"
        assert exposed.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (await client.post("/tokenize", json={"prompt": "ab"})).json() == {"count": 2, "tokens": ids("ab")}
        assert (await client.post("/tokenize", json=HI)).json()["tokens"][0] == 257
        _error(await client.post("/tokenize", json={"prompt": ""}), 400, "prompt")
        _error(await client.post("/tokenize", json={"prompt": "x" * 100_000}), 400, "prompt")
        _error(await client.post("/tokenize", json={"prompt": "a", "model": "gpt"}), 404, "model")
        _error(await client.post("/tokenize", json=HI | {"prompt": "a"}), 400, "prompt")


async def test_without_workers_the_server_lives_but_is_not_ready() -> None:
    async with served(router=ScriptedRouter(infos=())) as (_, client):
        assert (await client.get("/health")).status_code == 200
        assert "decode" in _error(await client.get("/ready"), 503)["message"]
        _error(await client.post(CHAT, json=HI), 503)


async def test_a_model_without_template_refuses_chats_with_the_remedy() -> None:
    async with served(text=toy_text(chat_template=None)) as (_, client):
        assert "/v1/completions" in _error(await client.post(CHAT, json=HI), 400, "messages")["message"]
        await _still_works(client)


# -- keys and secrets ---------------------------------------------------------------------------------------------

PATHS = (
    "/v1/models",
    "/v1/models/toy",
    COMPLETIONS,
    CHAT,
    "/metrics",
    "/ready",
    "/tokenize",
    "//v1/models",
    "/V1/MODELS",
)


@pytest.mark.parametrize(
    "path", [*PATHS, "/v1/models/", "/", "/docs", "/openapi.json", "/health/", "//health", "/HEALTH"]
)
async def test_every_route_but_health_wants_the_key(path: str) -> None:
    async with served(http=HttpSettings(api_key="s3cret")) as (_, client):
        url = f"http://tandem{path}"
        wrong = ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}, {"authorization": "Basic s3cret"})
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
            for headers in wrong:
                refused = await client.request(method, f"{url}?api_key=s3cret", headers=headers)
                assert refused.status_code == 401
            allowed = await client.request(method, url, headers={"authorization": "Bearer s3cret"})
            assert allowed.status_code != 401


async def test_health_needs_no_key_and_a_refusal_has_openais_shape() -> None:
    async with served(http=HttpSettings(api_key="s3cret")) as (_, client):
        assert (await client.get("/health")).status_code == 200
        response = await client.get("/v1/models", headers=[(b"authorization", b"Bearer \xe9")])
        assert _error(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_prompts_keys_and_tenants_are_in_no_log_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key, canary = "k3y-canary", "pr0mpt-canary"
    async with served(http=HttpSettings(api_key=key)) as (made, client):
        client.headers["authorization"] = f"Bearer {key}"
        made.workers.declines["decode-0", Expect] = [Declined(Code.UNAVAILABLE, "gone")]
        bodies: list[dict[str, Any]] = [
            {"prompt": canary},
            {"prompt": canary, "cache_salt": canary, "max_tokens": 3},
            {"prompt": canary, "temperature": -1},
            {"prompt": canary, "temperature": canary},
            {"prompt": [canary, 1]},
            {"prompt": canary, "stop": [""]},
            {"prompt": canary, "model": canary},
            {"prompt": canary, "logit_bias": {canary: 1}},
            {"prompt": canary, "sla_class": canary},
            {"prompt": canary, "cache_salt": canary, "request_id": 1},
            {"prompt": canary, "stop": {canary: canary}},
        ]
        texts = [(await client.post(COMPLETIONS, json=body)).text for body in bodies]
        raw = await client.post(
            COMPLETIONS, content=b'{"prompt": "pr0mpt-canary', headers={"content-type": "application/json"}
        )
        unauthorized = await client.get("/v1/models", headers={"authorization": f"Bearer {canary}"})
    said = "".join([*texts, raw.text, unauthorized.text, *(record.getMessage() for record in caplog.records)])
    for name in ("cluster", "uvicorn", "starlette"):
        ours = [record for record in caplog.records if record.name.startswith(name)]
        said += "".join(str(record.__dict__) for record in ours)
    assert canary not in said
    assert key not in said


async def test_refusals_are_counted_by_code_and_nothing_else() -> None:
    async with served() as (made, client):
        for number in range(50):
            await client.post(COMPLETIONS, json={"prompt": "a", "model": f"model-{number}"})
        assert made.refused == [Code.NOT_FOUND] * 50
        assert not made.outcomes
