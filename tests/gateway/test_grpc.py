"""`tandem.v1.Inference` over a real socket, with bare grpc and with the clients that come with Tandem."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from scripted import REPORT, Bench, ScriptedRouter, bench, ids, until, worker

from cluster.inference_server import GrpcSettings, InferenceServer, ask_from
from cluster.snapshot import Refusal
from engine.types import FinishReason
from tandem import AsyncClient, Client, errors
from tandem.messages import Code, Declined, Expect
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as rpc

GENERATE = "/tandem.v1.Inference/Generate"


@asynccontextmanager
async def served(*, grpc_settings: GrpcSettings | None = None, **kwargs: Any) -> AsyncIterator[tuple[Bench, str]]:
    async with bench(**kwargs) as made:
        server = InferenceServer(made.gateway, grpc_settings or GrpcSettings(), "127.0.0.1", 0)
        target = f"127.0.0.1:{await server.start()}"
        try:
            yield made, target
        finally:
            await server.stop(0.5)


@asynccontextmanager
async def stub(target: str, **options: int) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(target, options=[(f"grpc.{k}", v) for k, v in options.items()]) as channel:
        yield rpc.InferenceStub(channel)


async def _status(call: Any) -> tuple[str, str]:
    """Name of the status and details of a stream that is read to its end."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as failed:
        status = failed
    else:
        return "OK", ""
    assert "Traceback" not in (status.details() or "")
    return status.code().name, status.details() or ""


def _text(prompt: str = "hello", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(**{"max_tokens": 12, **sampling}))


# -- the wire -----------------------------------------------------------------------------------------------------


async def test_a_stream_has_text_tokens_logprobs_and_an_end_that_tells_all() -> None:
    async with served() as (_, target), stub(target) as inference:
        request = _text(logprobs=1, prompt_logprobs=0)
        responses = [response async for response in inference.Generate(request)]
        assert "".join(response.text for response in responses) == "Hello, world"
        assert [i for response in responses for i in response.token_ids] == ids("Hello, world")
        assert [entry.token_id for entry in responses[0].prompt_logprobs] == ids("hello")
        assert not responses[0].prompt_logprobs[0].HasField("logprob")
        (entry,) = responses[0].logprobs
        assert (entry.text, entry.logprob, entry.top[0].logprob) == ("H", -0.5, -2.0)
        last = responses[-1]
        assert {response.finish_reason for response in responses[:-1]} == {pb.FINISH_REASON_UNSPECIFIED}
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (5, 12, 16)
        assert (last.served_by.prefill_worker, last.served_by.decode_worker) == ("prefill-0", "decode-0")
        assert (last.served_by.kv_bytes, last.served_by.transport) == (REPORT.kv_bytes, "inproc")


def test_a_chat_without_max_tokens_may_fill_the_context_and_a_completion_has_the_usual_few() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    assert ask_from(pb.GenerateRequest(chat=chat), None).fill_context
    assert not ask_from(pb.GenerateRequest(text="hello"), None).fill_context


Break = Callable[[Bench], None]


def _decline(code: Code) -> Break:
    def broken(made: Bench) -> None:
        made.workers.declines["decode-0", Expect] = [Declined(code, "no")] * 1000

    return broken


def _refuse(code: Code) -> Break:
    def broken(made: Bench) -> None:
        made.router.refusal = Refusal(code, "the router says no")

    return broken


@pytest.mark.parametrize(
    ("request_", "broken", "code"),
    [
        (_text(temperature=-1.0), None, "INVALID_ARGUMENT"),
        (_text(temperature=float("nan")), None, "INVALID_ARGUMENT"),
        (_text(top_p=float("inf")), None, "INVALID_ARGUMENT"),
        (_text("x" * 600), None, "INVALID_ARGUMENT"),
        (_text(""), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**63 - 1])), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1])), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(chat=pb.Chat()), None, "INVALID_ARGUMENT"),
        (_text(stop_token_ids=[512]), None, "INVALID_ARGUMENT"),
        (_text(logit_bias={-1: 1.0}), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(text="a", timeout_s=float("nan")), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(text="a", cache_salt=""), None, "INVALID_ARGUMENT"),
        (pb.GenerateRequest(text="a", model="other"), None, "NOT_FOUND"),
        (_text(), _refuse(Code.NO_ROOM), "RESOURCE_EXHAUSTED"),
        (_text(), _refuse(Code.UNAVAILABLE), "UNAVAILABLE"),
        (_text(), _decline(Code.UNAVAILABLE), "UNAVAILABLE"),
        (_text(), _decline(Code.INTERNAL), "INTERNAL"),
        (pb.GenerateRequest(text="a", timeout_s=0.05), _decline(Code.NO_ROOM), "DEADLINE_EXCEEDED"),
    ],
)
async def test_each_fault_has_its_status(request_: pb.GenerateRequest, broken: Break | None, code: str) -> None:
    async with served() as (made, target), stub(target) as inference:
        if broken is not None:
            broken(made)
        assert (await _status(inference.Generate(request_)))[0] == code
        made.router.refusal = None
        made.workers.declines.clear()
        assert await _status(inference.Generate(_text())) == ("OK", "")


async def test_details_name_the_field() -> None:
    async with served() as (_, target), stub(target) as inference:
        assert (await _status(inference.Generate(_text(temperature=-1.0))))[1].startswith("temperature: ")
        assert (await _status(inference.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[999])))))[1].startswith(
            "prompt: "
        )


@pytest.mark.parametrize("method", ["Generate", "Abort"])
async def test_bytes_that_are_no_message_are_the_callers_fault(method: str) -> None:
    async with served() as (_made, target), grpc.aio.insecure_channel(target) as channel:
        path = f"/tandem.v1.Inference/{method}"
        if method == "Generate":
            assert (await _status(channel.unary_stream(path)(b"\xff\xff\xff")))[0] == "INVALID_ARGUMENT"
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(path)(b"\xff\xff\xff")
        assert caught.value.code().name == "INVALID_ARGUMENT"


async def test_an_unknown_method_is_unimplemented_and_a_bug_internal_without_its_story() -> None:
    async with served() as (made, target), grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tandem.v1.Inference/Nothing")(b"")
        assert caught.value.code().name == "UNIMPLEMENTED"

        async def broken(ask: object) -> None:
            raise RuntimeError("canary")

        made.gateway.prepare = broken  # type: ignore[method-assign, assignment]
        code, details = await _status(channel.unary_stream(GENERATE)(_text().SerializeToString()))
        assert code == "INTERNAL"
        assert "canary" not in details


@pytest.mark.parametrize("silent", [True, False])
async def test_a_cancelled_call_aborts_the_request_on_its_workers(silent: bool) -> None:
    async with served() as (made, target), stub(target) as inference:
        made.workers.hold, made.workers.silent = True, silent
        call = inference.Generate(_text())
        reading = asyncio.create_task(_status(call))
        await until(lambda: "r0" in made.workers.running)
        if not silent:
            await until(lambda: made.dispatch._flights["r0"].tokens == 1)
        call.cancel()
        await asyncio.wait({reading})
        await until(lambda: "r0" in made.workers.aborted, within_s=1)
        assert [outcome.code for outcome in made.outcomes] == [Code.ABORTED]


async def test_the_calls_own_deadline_reaches_the_request() -> None:
    async with served() as (made, target), stub(target) as inference:
        made.workers.silent = True
        assert (await _status(inference.Generate(_text(), timeout=0.3)))[0] == "DEADLINE_EXCEEDED"
        await until(lambda: "r0" in made.workers.aborted, within_s=1)
        expect = next(question for _, question in made.workers.asked if isinstance(question, Expect))
        assert expect.request.deadline_s is not None
        assert 0 < expect.request.deadline_s - expect.request.arrival_s <= 0.35  # the wire rounds it up


async def test_a_draining_server_is_unavailable_and_says_so_in_its_health() -> None:
    async with bench() as made:
        server = InferenceServer(made.gateway, GrpcSettings(), "127.0.0.1", 0)
        target = f"127.0.0.1:{await server.start()}"
        async with grpc.aio.insecure_channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            inference: Any = rpc.InferenceStub(channel)
            about = health_pb2.HealthCheckRequest(service="tandem.v1.Inference")
            assert (await health.Check(about)).status == health_pb2.HealthCheckResponse.SERVING
            await server.show_health(False)
            await made.gateway.drain(1.0)
            assert (await health.Check(about)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert (
                await health.Check(health_pb2.HealthCheckRequest())
            ).status == health_pb2.HealthCheckResponse.SERVING
            assert (await _status(inference.Generate(_text())))[0] == "UNAVAILABLE"
        await server.stop(0.5)


async def test_messages_above_four_mebibytes_work_up_to_the_limit() -> None:
    roomy = {"total_blocks": 10**6, "max_model_len": 10**7, "vocab_size": 2**31}
    router = ScriptedRouter(infos=(worker("p", "prefill", **roomy), worker("d", "decode", **roomy)))
    settings = GrpcSettings(max_message_bytes=6 << 20)
    big = {"max_send_message_length": -1, "max_receive_message_length": -1}
    async with served(router=router, grpc_settings=settings) as (_made, target), stub(target, **big) as inference:
        five = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[2**30] * (1 << 20)), sampling=pb.SamplingParams(max_tokens=1)
        )
        assert five.ByteSize() >= 5 << 20
        assert (await _status(inference.Generate(five)))[0] == "OK"
        seven = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**30] * (3 << 19)))
        assert (await _status(inference.Generate(seven)))[0] == "RESOURCE_EXHAUSTED"
        assert (await _status(inference.Generate(_text())))[0] == "OK"


# -- keys, health, reflection -------------------------------------------------------------------------------------


async def _reflected(channel: Any, metadata: Any = None) -> set[str]:
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in reflect.ServerReflectionInfo(iter([request]), metadata=metadata):
        return {service.name for service in response.list_services_response.service}
    return set()


async def test_reflection_names_the_services() -> None:
    async with served() as (_, target), grpc.aio.insecure_channel(target) as channel:
        assert {"tandem.v1.Inference", "grpc.health.v1.Health"} <= await _reflected(channel)


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", "s3cret"),)])
async def test_every_method_but_health_wants_the_key(metadata: Any) -> None:
    async with (
        served(grpc_settings=GrpcSettings(api_key="s3cret")) as (_made, target),
        grpc.aio.insecure_channel(target) as channel,
    ):
        inference: Any = rpc.InferenceStub(channel)
        assert (await _status(inference.Generate(_text(), metadata=metadata)))[0] == "UNAUTHENTICATED"
        for method, message in (("Abort", pb.AbortRequest()), ("ListModels", pb.ListModelsRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await getattr(inference, method)(message, metadata=metadata)
            assert caught.value.code().name == "UNAUTHENTICATED"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _reflected(channel, metadata)
        assert refused.value.code().name == "UNAUTHENTICATED"
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())
        good = (("authorization", "Bearer s3cret"),)
        assert (await _status(inference.Generate(_text(), metadata=good)))[0] == "OK"
        assert "tandem.v1.Inference" in await _reflected(channel, good)


# -- the clients --------------------------------------------------------------------------------------------------


async def test_the_async_client_generates_chats_streams_lists_and_aborts() -> None:
    async with served() as (_made, target), AsyncClient(target) as client:
        answer = await client.generate("hello", max_tokens=5, seed=11, stop="zzz", logprobs=0)
        assert (answer.text, answer.finish_reason, answer.usage.completion_tokens) == ("Hello", "length", 5)
        assert (answer.served_by.seed, answer.served_by.decode_worker) == (11, "decode-0")
        assert [entry.logprob for entry in answer.logprobs] == [-0.5] * 5
        assert (await client.generate([104, 101], max_tokens=2)).text == "He"
        assert (await client.chat("hi")).text == "Hello, world"
        pieces = [piece async for piece in client.chat([{"role": "user", "content": "hi"}], stream=True)]
        assert "".join(piece.text for piece in pieces) == "Hello, world"
        (model,) = await client.models()
        assert (model.id, model.max_model_len, model.sla_classes["fast"]["priority"]) == ("toy", 512, 5)
        assert await client.abort("nobody") is False


async def test_a_request_aborted_from_elsewhere_ends_with_abort() -> None:
    async with served() as (made, target), AsyncClient(target) as client:
        made.workers.hold = True
        running = asyncio.create_task(_collect(client.generate("hello", stream=True, request_id="mine")))
        await until(lambda: "mine.r0" in made.workers.running)
        assert await client.abort("mine") is True
        assert (await running)[-1].finish_reason == "abort"


async def _collect(pieces: Any) -> list[Any]:
    return [piece async for piece in pieces]


async def test_leaving_a_stream_early_aborts_it() -> None:
    async with served() as (made, target), AsyncClient(target) as client:
        made.workers.hold = True
        pieces = client.generate("hello", stream=True)
        assert (await anext(pieces)).text == "H"
        await pieces.aclose()
        await until(lambda: "r0" in made.workers.aborted, within_s=1)


@pytest.mark.parametrize(
    ("options", "broken", "error"),
    [
        ({"temperature": -1.0}, None, errors.InvalidRequestError),
        ({"model": "other"}, None, errors.NotFoundError),
        ({"max_tokens": 2**64}, None, errors.InvalidRequestError),
        ({}, _refuse(Code.NO_ROOM), errors.OverloadedError),
        ({}, _refuse(Code.UNAVAILABLE), errors.UnavailableError),
        ({"timeout_s": 0.05}, _decline(Code.NO_ROOM), errors.DeadlineError),
        ({}, _decline(Code.INTERNAL), errors.ServerError),
    ],
)
async def test_errors_say_what_the_caller_can_do(options: Any, broken: Break | None, error: type[Exception]) -> None:
    async with served() as (made, target), AsyncClient(target) as client:
        if broken is not None:
            broken(made)
        with pytest.raises(error):
            await client.generate("hello", **options)


async def test_a_misspelt_option_is_a_type_error() -> None:
    async with served() as (_, target), AsyncClient(target) as client:
        with pytest.raises(TypeError, match="max_token'"):
            await client.generate("hello", max_token=1)  # type: ignore[call-overload]


async def test_the_wrong_key_is_an_error_of_its_own() -> None:
    async with served(grpc_settings=GrpcSettings(api_key="k")) as (_, target):
        async with AsyncClient(target, api_key="k") as client:
            assert (await client.generate("hello")).text == "Hello, world"
        async with AsyncClient(target, api_key="wrong") as client:
            with pytest.raises(errors.UnauthenticatedError):
                await client.generate("hello")


async def test_a_server_out_of_reach_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.UnavailableError):
            await client.generate("hello")


async def test_the_blocking_client_does_the_same() -> None:
    def use(target: str) -> None:
        with Client(target) as client:
            answer = client.generate("hello", max_tokens=5)
            assert (answer.text, answer.finish_reason) == ("Hello", "length")
            assert "".join(piece.text for piece in client.chat("hi", stream=True)) == "Hello, world"
            stopped = client.chat([{"role": "user", "content": "hi"}], stop=["lo", "zz"])
            assert (stopped.text, stopped.finish_reason) == ("Hel", "stop")
            assert [model.id for model in client.models()] == ["toy"]
            assert client.abort("nobody") is False
            with pytest.raises(errors.InvalidRequestError, match="temperature"):
                client.generate("hello", temperature=-1.0)
            pieces = client.generate("hello", stream=True)
            next(pieces)
            pieces.close()

    async with served() as (made, target):
        await asyncio.wait_for(asyncio.to_thread(use, target), 20)
        assert made.outcomes[0].finish is FinishReason.LENGTH


def test_importing_tandem_loads_no_grpc() -> None:
    import subprocess
    import sys

    code = "import sys, tandem; assert 'grpc' not in sys.modules; tandem.Client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
