"""Both front ends on real sockets: the official OpenAI client, many streams at once, clients that vanish, stopping."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from scripted import IMPATIENT, NOBODY, Bench, bench, until

from cluster.http_server import HttpServer, HttpSettings, build_app
from cluster.inference_server import GrpcSettings, InferenceServer
from tandem import AsyncClient
from tandem.messages import Code

HI: list[Any] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def http(settings: HttpSettings | None = None, **kwargs: Any) -> AsyncIterator[tuple[Bench, str]]:
    async with bench(**kwargs) as made:
        server = HttpServer(build_app(made.gateway, settings or HttpSettings()), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{await server.start()}"
        try:
            yield made, url
        finally:
            await server.stop(1.0)


def _openai(url: str, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=10)


# -- the official client ------------------------------------------------------------------------------------------


async def test_the_openai_client_chats_streams_completes_and_lists() -> None:
    async with http(HttpSettings(api_key="k")) as (_, url), _openai(url) as client:
        chat = await client.chat.completions.create(model="toy", messages=HI, logprobs=True, top_logprobs=2)
        assert chat.choices[0].message.content == "Hello, world"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.choices[0].logprobs is not None
        assert len(chat.choices[0].logprobs.content or []) == 12
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 12
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 16

        stream = await client.chat.completions.create(
            model="toy", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(said) == "Hello, world"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12

        completion = await client.completions.create(
            model="toy", prompt=["a", "b"], max_tokens=5, n=1, extra_body={"top_k": 3, "sla_class": "fast"}
        )
        assert [choice.text for choice in completion.choices] == ["Hello", "Hello"]
        assert [model.id async for model in client.models.list()] == ["toy"]


async def test_the_openai_client_raises_its_own_errors() -> None:
    async with http(HttpSettings(api_key="k"), limits=IMPATIENT) as (made, url), _openai(url) as client:
        with pytest.raises(openai.BadRequestError, match="temperature") as bad:
            await client.chat.completions.create(model="toy", messages=HI, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=HI)
        async with _openai(url, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        made.workers.hold = True
        stream = await client.chat.completions.create(model="toy", messages=HI, stream=True)
        made.router.refusal = NOBODY
        made.hub.lost("decode-0", "1", "killed")
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in stream:
                pass
        made.workers.hold = False
        await made.gateway.drain(1.0)
        with pytest.raises(openai.InternalServerError, match="draining"):
            await client.chat.completions.create(model="toy", messages=HI)


# -- many streams -------------------------------------------------------------------------------------------------


async def test_sixty_four_open_streams_leave_control_calls_fast_and_more_are_refused() -> None:
    async with http(max_streams=66) as (made, url):
        grpc_server = InferenceServer(made.gateway, GrpcSettings(), "127.0.0.1", 0)
        target = f"127.0.0.1:{await grpc_server.start()}"
        made.workers.hold = True
        async with httpx.AsyncClient(base_url=url, timeout=10) as client, AsyncClient(target) as grpc_client:
            streams = [asyncio.create_task(_read(client, {"prompt": "a", "stream": True})) for _ in range(32)]
            streams += [asyncio.create_task(_read_grpc(grpc_client)) for _ in range(32)]
            await until(lambda: sum(flight.tokens for flight in made.dispatch._flights.values()) == 64)

            made.workers.hold = False
            for _ in range(3):
                assert (await _timed(client.get("/health"))).status_code == 200
                assert (await _timed(client.get("/metrics"))).status_code == 200
                assert (await _timed(client.get("/v1/models"))).status_code == 200
                assert [model.id for model in await _timed(grpc_client.models())] == ["toy"]
                assert await _timed(grpc_client.abort("nobody")) is False
                one = await _timed(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
                assert one.json()["choices"][0]["text"] == "H"
            two = await client.post("/v1/completions", json={"prompt": "a", "n": 3})
            assert two.status_code == 429

            made.workers.go.set()
            assert await asyncio.wait_for(asyncio.gather(*streams), 20) == ["Hello, world"] * 64
        await grpc_server.stop(0.5)


async def _timed(call: Any) -> Any:
    started = time.monotonic()
    answer = await call
    assert time.monotonic() - started < 0.5
    return answer


async def _read(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


async def _read_grpc(client: AsyncClient) -> str:
    return "".join([piece.text async for piece in client.generate("a", stream=True)])


# -- connections --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_socket_aborts_its_request_within_a_second(stream: bool) -> None:
    async with http() as (made, url):
        made.workers.hold = True
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = json.dumps({"prompt": "a", "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: "r0" in made.workers.running)
        writer.close()
        await until(lambda: "r0" in made.workers.aborted, within_s=1)
        assert [outcome.code for outcome in made.outcomes] == [Code.ABORTED]
        reader.feed_eof()


async def test_a_connection_goes_on_after_an_error() -> None:
    async with (
        http() as (_, url),
        httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=1), timeout=5) as client,
    ):
        for content in (b"{", b"[]", b"", b'{"prompt": "\\ud83d"}'):
            response = await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400
            assert response.headers.get("connection", "keep-alive") == "keep-alive"
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        assert answer.json()["choices"][0]["text"] == "Hello"


async def test_a_body_declared_too_large_is_refused_unread() -> None:
    async with http(HttpSettings(max_body_bytes=1000)) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 9999999999\r\n\r\n"
        )
        status = await asyncio.wait_for(reader.readline(), 2)
        assert status.startswith(b"HTTP/1.1 413")
        writer.close()


async def test_stopping_lets_a_stream_in_flight_end() -> None:
    async with bench() as made:
        server = HttpServer(build_app(made.gateway, HttpSettings()), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{await server.start()}"
        made.workers.hold = True
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            reading = asyncio.create_task(_read(client, {"prompt": "a", "stream": True}))
            await until(lambda: "r0" in made.dispatch._flights and made.dispatch._flights["r0"].tokens == 1)
            stopping = asyncio.create_task(server.stop(5.0))
            await until(lambda: server._server.should_exit)
            made.workers.go.set()
            assert await reading == "Hello, world"
        await asyncio.wait_for(stopping, 5)
