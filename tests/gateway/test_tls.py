"""Both front ends with TLS on real sockets: who gets in, and what is said to whom does not."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
from scripted import bench

from cluster.config import TlsSection
from cluster.http_server import HttpServer, HttpSettings, build_app
from cluster.inference_server import GrpcSettings, InferenceServer
from tandem import AsyncClient, Client
from tandem.errors import RequestError, TlsError, UnauthenticatedError, UnavailableError
from tests.certificates import Authority, Pair

KEY = "k"


@dataclass(frozen=True)
class Made:
    ours: Authority
    other: Authority
    server: Pair
    client: Pair
    stranger: Pair


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("tls")
    ours, other = Authority(folder, "ours"), Authority(folder, "other")
    return Made(ours, other, ours.signed("server", "127.0.0.1"), ours.signed("client"), other.signed("stranger"))


def section(made: Made, **more: str) -> TlsSection:
    return TlsSection(cert=made.server.cert, key=made.server.key, **more)


@asynccontextmanager
async def grpc_port(tls: TlsSection | None) -> AsyncIterator[int]:
    async with bench() as gateway:
        server = InferenceServer(gateway.gateway, GrpcSettings(api_key=KEY, tls=tls), "127.0.0.1", 0)
        yield await server.start()
        await server.stop(0.5)


@asynccontextmanager
async def https_port(tls: TlsSection) -> AsyncIterator[int]:
    async with bench() as gateway:
        app = build_app(gateway.gateway, HttpSettings(api_key=KEY))
        server = HttpServer(app, "127.0.0.1", 0, tls=tls)
        yield await server.start()
        await server.stop(1.0)


async def said(port: int, *, host: str = "127.0.0.1", api_key: str = KEY, **trust: str) -> str:
    async with AsyncClient(f"{host}:{port}", api_key=api_key, **trust) as client:
        return (await client.generate("hello", timeout_s=10.0)).text


async def refusal(port: int, *, host: str = "127.0.0.1", api_key: str = KEY, **trust: str) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await said(port, host=host, api_key=api_key, **trust)
    return refused.value


# -- gRPC -------------------------------------------------------------------------------------------------------------


async def test_the_client_knows_the_server_by_its_authority_or_by_its_certificate_and_still_needs_the_key(
    made: Made,
) -> None:
    async with grpc_port(section(made)) as port:
        for trusted in (made.ours.ca, made.server.cert):
            assert await said(port, tls_ca=trusted) == "Hello, world"
        assert isinstance(await refusal(port, api_key="wrong", tls_ca=made.ours.ca), UnauthenticatedError)


async def test_what_is_wrong_with_the_trust_is_said_with_its_remedy(made: Made) -> None:
    async with grpc_port(section(made)) as port:
        wrong = await refusal(port, tls_ca=made.other.ca)
        assert isinstance(wrong, TlsError)
        assert not wrong.retryable
        assert wrong.message.startswith("tls_ca did not sign the server's certificate: name the PEM file of who did")
        named = await refusal(port, host="localhost", tls_ca=made.ours.ca)
        assert named.message.startswith("the server's certificate is for other names: connect by one that it names")
        plain = await refusal(port)
        assert isinstance(plain, UnavailableError)
        assert "if the server wants TLS, name tls_ca" in plain.message
    async with grpc_port(None) as port:
        assert (await refusal(port, tls_ca=made.ours.ca)).message.startswith("the server does not speak TLS: leave")


async def test_a_server_that_wants_to_see_a_certificate_sees_one_of_its_authority(made: Made) -> None:
    async with grpc_port(section(made, client_ca=made.ours.ca)) as port:
        shown = {"tls_cert": made.client.cert, "tls_key": made.client.key}
        assert await said(port, tls_ca=made.ours.ca, **shown) == "Hello, world"
        assert "tls_cert and tls_key" in (await refusal(port, tls_ca=made.ours.ca)).message
        stranger = {"tls_cert": made.stranger.cert, "tls_key": made.stranger.key}
        assert "tls_cert and tls_key" in (await refusal(port, tls_ca=made.ours.ca, **stranger)).message


def test_trust_that_can_never_work_is_refused_before_anything_is_asked(made: Made) -> None:
    with pytest.raises(ValueError, match=r"tls_ca: .*server\.key holds no certificate in PEM form"):
        Client("127.0.0.1:1", tls_ca=made.server.key)
    with pytest.raises(ValueError, match="tls_cert and tls_key need tls_ca"):
        Client("127.0.0.1:1", tls_cert=made.client.cert, tls_key=made.client.key)
    with pytest.raises(ValueError, match="go together"):
        Client("127.0.0.1:1", tls_ca=made.ours.ca, tls_cert=made.client.cert)
    with pytest.raises(FileNotFoundError):
        Client("127.0.0.1:1", tls_ca=made.ours.ca + ".gone")


# -- HTTP -------------------------------------------------------------------------------------------------------------


def context(ca: str, shown: Pair | None = None) -> ssl.SSLContext:
    trusting = ssl.create_default_context(cafile=ca)
    if shown is not None:
        trusting.load_cert_chain(shown.cert, shown.key)
    return trusting


async def test_the_openai_client_chats_over_https_with_its_key(made: Made) -> None:
    async with https_port(section(made)) as port, httpx.AsyncClient(verify=context(made.ours.ca)) as trusting:
        url = f"https://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=trusting) as client:
            chat = await client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "hi"}])
            assert chat.choices[0].message.content == "Hello, world"
            stranger = client.with_options(api_key="wrong")
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


async def test_who_trusts_another_authority_or_shows_no_certificate_gets_nothing(made: Made) -> None:
    async with https_port(section(made, client_ca=made.ours.ca)) as port:
        health = f"https://127.0.0.1:{port}/health"
        async with httpx.AsyncClient(verify=context(made.ours.ca, made.client)) as client:
            assert (await client.get(health)).status_code == 200
        for trust in (context(made.other.ca, made.client), context(made.ours.ca), context(made.ours.ca, made.stranger)):
            async with httpx.AsyncClient(verify=trust) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(health)
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"http://127.0.0.1:{port}/health")
