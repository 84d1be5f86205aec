"""The gateway's TLS as the one who starts it and the commands on its machine meet it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster import launch, tls
from cluster.cli import main
from cluster.config import GatewaySection, TlsSection, default_config
from cluster.config_text import config_from_text
from cluster.launch import Running
from cluster.ray_session import RaySession
from cluster.run_state import RunState, make_run_folder, save
from tests.certificates import Authority, Pair
from tests.cluster.test_operator_routes import Gateway


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.signed("gateway", "127.0.0.1")


# -- at the start -----------------------------------------------------------------------------------------------------


def test_good_files_pass_and_their_paths_hold_for_commands_that_are_given_elsewhere(
    authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(pair.cert).parent
    monkeypatch.chdir(folder)
    section = TlsSection(cert="gateway.pem", key="gateway.key", client_ca="authority.pem", ca="authority.pem")
    assert tls.checked(section) == TlsSection(cert=pair.cert, key=pair.key, client_ca=authority.ca, ca=authority.ca)


BAD = {
    "gone": ({"cert": "gone.pem"}, r"gateway\.tls\.cert: .*gone\.pem cannot be read \(No such file or directory\)"),
    "a key of another": ({"key": "authority.key"}, "no certificate and its private key .*key values mismatch"),
    "exchanged": ({"cert": "gateway.key", "key": "gateway.pem"}, "no certificate and its private key"),
    "no authority": ({"client_ca": "gateway.key"}, r"gateway\.tls\.client_ca: .* holds no certificate .*as PEM"),
    "nothing to know it by": ({"ca": "gateway.key"}, r"gateway\.tls\.ca: .* holds no certificate .*as PEM"),
}


@pytest.mark.parametrize(("changes", "why"), BAD.values(), ids=BAD)
def test_files_that_cannot_serve_are_refused_by_key_before_anything_starts(
    pair: Pair, changes: dict[str, str], why: str
) -> None:
    folder = Path(pair.cert).parent
    section = replace(
        TlsSection(cert=pair.cert, key=pair.key), **{key: str(folder / name) for key, name in changes.items()}
    )
    with pytest.raises(tls.TlsProblem, match=why):
        launch.start(replace(default_config(), gateway=GatewaySection(tls=section)), say=print)


def test_the_commands_are_told_how_to_know_the_gateway_and_what_to_show_it() -> None:
    text = "gateway: {host: 0.0.0.0, api_key_env: K, tls: {cert: /c.pem, key: /k.pem%s}}"

    def state(more: str) -> RunState:
        config = config_from_text(text % more)
        session = RaySession(namespace="n", node_id="i", address="a", scratch=None)
        return launch._state(Running(config, session, "0.0.0.0:1", "0.0.0.0:2"), None)

    plain = state("")
    assert (plain.grpc, plain.http) == ("localhost:1", "localhost:2"), "a name that a certificate may have"
    assert (plain.tls_ca, plain.tls_cert, plain.tls_key) == ("/c.pem", None, None)
    mutual = state(", ca: /a.pem, client_ca: /b.pem")
    assert (mutual.tls_ca, mutual.tls_cert, mutual.tls_key) == ("/a.pem", "/c.pem", "/k.pem")


# -- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority, pair: Pair) -> Iterator[RunState]:
    """Wants to see a certificate, and shows its own."""
    monkeypatch.setenv("TANDEM_RUN_DIR", str(tmp_path / "run"))
    make_run_folder()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(pair.cert, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    yield RunState(
        grpc="127.0.0.1:1",
        http=f"127.0.0.1:{server.server_port}",
        model="toy",
        tls_ca=authority.ca,
        tls_cert=pair.cert,
        tls_key=pair.key,
    )
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize("trusts", ["the authority", "the certificate itself"])
def test_the_commands_ask_over_https(gateway: RunState, pair: Pair, trusts: str) -> None:
    save(gateway if trusts == "the authority" else replace(gateway, tls_ca=pair.cert))
    said = CliRunner().invoke(main, ["drain", "decode-0"])
    assert (said.exit_code, "decode-0 is draining" in said.output) == (0, True), said.output


def test_commands_that_trust_another_authority_name_the_key_to_set(gateway: RunState, tmp_path: Path) -> None:
    save(replace(gateway, tls_ca=Authority(tmp_path, "other").ca))
    said = CliRunner().invoke(main, ["status"])
    assert said.exit_code == 1
    assert "is not trusted" in said.output
    assert "gateway.tls.ca must name the authority that signed gateway.tls.cert" in said.output
