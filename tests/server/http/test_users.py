"""The HTTP port of a process with users: health for everybody, metrics for users who prove who they are."""

import base64
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess, RegistryProcess
from tests.support.users import ADMIN, READER, write_users

A_MINUTE: Final = 5
"""Failed logins."""


@pytest.fixture(params=[BrokerProcess, RegistryProcess])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess | RegistryProcess]:
    users = write_users(tmp_path / "users.yaml")
    flags = ("--users-file", str(users), "--failed-logins-per-minute", str(A_MINUTE))
    with request.param(tmp_path / "data", *flags) as process:
        yield process


def ask(process: BrokerProcess | RegistryProcess, path: str, authorization: str | None = None) -> http.client.HTTPResponse:
    host, _, port = process.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SOCKET_TIMEOUT_S)
    connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
    return connection.getresponse()


def basic(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def test_health_is_for_everybody_and_metrics_for_users(process: BrokerProcess | RegistryProcess) -> None:
    """E-05: by name and password, or by a secret alone; whoever is no administrator may read them, too."""
    for path in ("/healthz", "/readyz"):
        assert ask(process, path).status == 200
    for proof in (basic(*READER), basic(*ADMIN), f"Bearer {READER.secret}", f"bearer {ADMIN.secret}"):
        answer = ask(process, "/metrics", proof)
        assert answer.status == 200
        assert b"metaq_build_info" in answer.read()
    without = ask(process, "/metrics")
    assert (without.status, without.headers["WWW-Authenticate"]) == (401, 'Basic realm="metaq"')
    assert b"anonymous may not look into this broker; log in first" in without.read()


def test_wrong_proofs_are_refused_and_counted(process: BrokerProcess | RegistryProcess) -> None:
    """E-05: no faster than the rate, whatever proof is tried; who was right before is not kept out."""
    assert ask(process, "/metrics", basic(*READER)).status == 200
    for proof in ("Basic nonsense!", "Basic é", f"Basic {base64.b64encode(bytes([255])).decode()}"):
        malformed = ask(process, "/metrics", proof)
        assert (malformed.status, b"needs name and password in Base64" in malformed.read()) == (401, True), proof
    tries = (basic("reader2", READER.secret), f"Bearer {READER.secret}x", basic("nemo", "password"), "Bearer ", "Bearer é")
    for proof in tries[:A_MINUTE]:
        answer = ask(process, "/metrics", proof)
        assert (answer.status, b"wrong user or password" in answer.read()) == (401, True), proof
    kept_out = ask(process, "/metrics", basic(*ADMIN))
    assert (kept_out.status, b"too many wrong passwords" in kept_out.read()) == (401, True)
    assert ask(process, "/metrics", basic(*READER)).status == 200
