"""Several answers to one prompt, `n`, `best_of` and beams, as both front ends ask for them and tell them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from scripted import Bench, bench, ids

from cluster.http_server import HttpSettings, build_app
from cluster.inference_server import GrpcSettings, InferenceServer
from engine.types import Branching, FinishReason
from tandem import AsyncClient
from tandem.errors import InvalidRequestError
from tandem.messages import Code, Expect

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def over_http() -> AsyncIterator[tuple[Bench, httpx.AsyncClient]]:
    async with bench() as made:
        transport = httpx.ASGITransport(build_app(made.gateway, HttpSettings()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://tandem", timeout=5) as client:
            yield made, client


@asynccontextmanager
async def over_grpc() -> AsyncIterator[tuple[Bench, AsyncClient]]:
    async with bench() as made:
        server = InferenceServer(made.gateway, GrpcSettings(), "127.0.0.1", 0)
        async with AsyncClient(f"127.0.0.1:{await server.start()}") as client:
            yield made, client
        await server.stop(0.5)


def asked(made: Bench) -> Branching | None:
    """What the one request that reached decode asks for."""
    (request,) = [question.request for _, question in made.workers.asked if isinstance(question, Expect)]
    return request.branching


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# -- HTTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "hello"}), (CHAT, HI)])
async def test_n_answers_come_from_one_request_and_its_prompt_counts_once(path: str, prompt: Any) -> None:
    async with over_http() as (made, client):
        body = (await client.post(path, json=prompt | {"n": 3, "max_tokens": 5})).json()
        assert asked(made) == Branching(n=3)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
        texts = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in body["choices"]]
        assert texts == ["Hello"] * 3
        assert body["usage"]["completion_tokens"] == 15
        assert body["usage"]["prompt_tokens"] == made.outcomes[0].prompt_tokens
        assert "scores" not in body["tandem"]


async def test_streamed_answers_come_interleaved_each_with_its_end_and_one_usage() -> None:
    async with over_http() as (_, client):
        stream = HI | {"n": 2, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = events(await client.post(CHAT, json=stream))
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == 6
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["index"] for choice in choices[:4]] == [0, 0, 1, 1], "an opening, then text; both at once"
        for index in (0, 1):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["delta"].get("content", "") for choice in own) == "Hel"
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["length"]
        assert ["tandem" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_with_logprobs_begins_each_of_several_answers(stream: bool) -> None:
    async with over_http() as (_, client):
        body = {"prompt": "hey", "n": 2, "max_tokens": 2, "echo": True, "logprobs": 0, "stream": stream}
        response = await client.post(COMPLETIONS, json=body)
        bodies = events(response)[:-1] if stream else [response.json()]
        choices = [choice for one in bodies for choice in one["choices"]]
        for index in (0, 1):
            own = [choice for choice in choices if choice["index"] == index]
            assert "".join(choice["text"] for choice in own) == "heyHe"
            assert [token for choice in own for token in choice["logprobs"]["tokens"]] == list("heyHe")


@pytest.mark.parametrize(
    ("fields", "branching"),
    [
        ({"n": 2, "best_of": 5}, Branching(n=2, best_of=5)),
        ({"best_of": 3}, Branching(best_of=3)),
        ({"n": 2, "best_of": 2}, Branching(n=2)),
        ({"best_of": 1}, None),
        ({"use_beam_search": False}, None),
        ({"use_beam_search": True, "n": 2, "best_of": 4}, Branching(n=2, beam_width=4)),
        ({"use_beam_search": True, "n": 2, "beam_width": 4}, Branching(n=2, beam_width=4)),
        ({"use_beam_search": True, "n": 3}, Branching(n=3, beam_width=3)),
        (
            {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "early_stopping": True},
            Branching(beam_width=4, length_penalty=0.5, early_stopping="yes"),
        ),
        (
            {"use_beam_search": True, "beam_width": 4, "early_stopping": "never"},
            Branching(beam_width=4, early_stopping="never"),
        ),
        ({"use_beam_search": True, "beam_width": 2, "early_stopping": False}, Branching(beam_width=2)),
    ],
)
async def test_best_of_and_beams_are_asked_for_in_vllms_words(fields: Any, branching: Branching | None) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HI)):
        async with over_http() as (made, client):
            response = await client.post(path, json=prompt | {"max_tokens": 5} | fields)
            assert response.status_code == 200, response.text
            assert asked(made) == branching
            scores = response.json()["tandem"].get("scores")
            withheld = branching is not None and branching.withheld
            assert scores == ([-0.5 - rank for rank in range(branching.n)] if branching and withheld else None)
            assert len(response.json()["choices"]) == (branching.n if branching else 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"use_beam_search": True, "beam_width": 2, "stream": True}, "use_beam_search"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width"),
        ({"use_beam_search": True, "best_of": 0}, "best_of"),
        ({"use_beam_search": True, "beam_width": 200}, "beam_width"),
        ({"use_beam_search": True, "best_of": 200}, "best_of"),
        ({"use_beam_search": True, "beam_width": 2, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "n"),
        ({"use_beam_search": True, "beam_width": 2, "early_stopping": "maybe"}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 2, "early_stopping": 1.5}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 2, "length_penalty": 99}, "length_penalty"),
        ({"use_beam_search": True, "beam_width": 2, "presence_penalty": 1}, "presence_penalty"),
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
async def test_what_makes_no_sense_together_is_refused_by_field(fields: dict[str, Any], param: str) -> None:
    async with over_http() as (made, client):
        response = await client.post(COMPLETIONS, json={"prompt": "a"} | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not made.workers.asked
        assert made.refused == [Code.INVALID]


@pytest.mark.parametrize(
    ("fields", "param"), [({"logprobs": True}, "logprobs"), ({"logprobs": True, "top_logprobs": 2}, "top_logprobs")]
)
async def test_a_chat_with_beams_has_no_log_probabilities(fields: dict[str, Any], param: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "use_beam_search": True, "beam_width": 2}
    async with over_http() as (made, client):
        response = await client.post("/v1/chat/completions", json=chat | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not made.workers.asked


async def test_best_of_that_equals_n_may_be_streamed() -> None:
    async with over_http() as (_, client):
        response = await client.post(COMPLETIONS, json={"prompt": "a", "n": 2, "best_of": 2, "stream": True})
        assert events(response)[-1] == "[DONE]"


# -- gRPC ---------------------------------------------------------------------------------------------------------


async def test_the_client_gets_all_answers_and_who_served_them() -> None:
    async with over_grpc() as (made, client):
        answer = await client.generate("hello", n=3, max_tokens=5)
        assert asked(made) == Branching(n=3)
        assert answer.text == "Hello"
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.text for choice in answer.choices} == {"Hello"}
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 15)
        assert answer.choices[2].served_by == answer.served_by
        assert answer.served_by.decode_worker == "decode-0"


async def test_streamed_messages_say_which_answer_and_the_very_last_says_the_rest() -> None:
    async with over_grpc() as (_, client):
        pieces = [piece async for piece in client.generate("hello", n=2, max_tokens=3, stream=True)]
        assert [piece.index for piece in pieces] == [0, 1] * 3
        assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["length"] * 2
        assert [piece.usage.completion_tokens for piece in pieces] == [0] * 5 + [6]


@pytest.mark.parametrize(
    ("options", "branching"),
    [
        ({"n": 2, "best_of": 4}, Branching(n=2, best_of=4)),
        (
            {"n": 2, "beam_width": 3, "length_penalty": 0.0, "early_stopping": "never"},
            Branching(n=2, beam_width=3, length_penalty=0.0, early_stopping="never"),
        ),
    ],
)
async def test_what_is_chosen_at_the_end_comes_best_first_with_its_score(options: Any, branching: Branching) -> None:
    async with over_grpc() as (made, client):
        answer = await client.generate("hello", max_tokens=5, **options)
        assert asked(made) == branching
        assert [(choice.index, choice.text, choice.score) for choice in answer.choices] == [
            (0, "Hello", -0.5),
            (1, "Hello", -1.5),
        ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"beam_width": -1}, "beam_width"),
        ({"beam_width": 2, "early_stopping": "maybe"}, "early_stopping"),
        ({"beam_width": 2, "logprobs": 1}, "logprobs"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
)
async def test_a_bad_combination_is_an_invalid_argument_that_names_the_field(options: Any, field: str) -> None:
    async with over_grpc() as (made, client):
        with pytest.raises(InvalidRequestError, match=f"^{field}: "):
            await client.generate("hello", **options)
        assert not made.workers.asked


async def test_a_stop_string_in_one_answer_leaves_the_others_their_tokens() -> None:
    async with over_grpc() as (made, client):
        made.workers.reply = lambda request: ids("Hello, world")
        made.workers.finish = FinishReason.STOP
        answer = await client.generate("hello", n=2, stop="o,", max_tokens=40)
        assert [choice.text for choice in answer.choices] == ["Hell", "Hell"]
        assert made.workers.cut == {("r0", 0)}
