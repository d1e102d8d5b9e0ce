"""The first byte of a connection decides what it speaks, before and again after a TLS handshake."""

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess

Stream = socket.socket
QUICK = ("--handshake-timeout-ms", "200")
LONG_BODY = b"x" * 500_000


class Secured(NamedTuple):
    """A broker with a certificate, and what a client needs to trust it."""

    broker: BrokerProcess
    context: ssl.SSLContext


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("plain") / "data") as broker:
        yield broker


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(key))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with BrokerProcess(folder / "data", "--tls-certificate", str(chain), "--tls-key", str(key)) as broker:
        yield Secured(broker, context)


def read_all(connection: Stream) -> bytes:
    """Return all that arrives until the broker closes the connection, in order or by a reset."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return data


def ask(connection: Stream, code: int, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
    connection.sendall(encode_request(code, 1, fields, body))
    reader = FrameReader()
    while True:
        frames = reader.receive(connection.recv(65536))
        if frames:
            return frames[0]


def send_fields(topic: str) -> dict[str, str]:
    return {"a": "g", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0"}


def pull_fields(topic: str) -> dict[str, str]:
    numbers = {"queueId": "0", "queueOffset": "0", "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0"}
    return {
        "consumerGroup": "g",
        "topic": topic,
        **numbers,
        "suspendTimeoutMillis": "0",
        "subVersion": "0",
        "subscription": "*",
    }


@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n\r\n"])
def test_a_letter_or_a_line_end_begins_text(plain: BrokerProcess, before: bytes) -> None:
    """SG-095, RD-024: also when the first byte comes alone, and empty lines before the first command are harmless."""
    with plain.connect() as connection:
        everything = before + b"version 7\r\nquit\r\n"
        connection.sendall(everything[:1])
        connection.sendall(everything[1:])
        assert b"result 200" in read_all(connection)


def test_a_frame_begins_remoting(plain: BrokerProcess) -> None:
    """SG-095, RD-020: a command nobody knows gets the standard answer."""
    with plain.connect() as connection:
        answer = ask(connection, 29_999, {})
        assert (answer.code, answer.remark) == (Response.REQUEST_CODE_NOT_SUPPORTED, "the request code 29999 is not supported")


def test_a_frame_of_the_largest_size_is_no_text(plain: BrokerProcess) -> None:
    """RD-020: 16 MiB begin with the byte 01; one byte more closes the connection without an answer."""
    with plain.connect() as connection:
        head = b"\x00\x00\x00\x02{}"
        connection.sendall((16 * 1024 * 1024).to_bytes(4, "big") + head + bytes(16 * 1024 * 1024 - len(head)))
        assert read_all(connection) == b""  # a header without a code
    with plain.connect() as connection:
        connection.sendall((16 * 1024 * 1024 + 1).to_bytes(4, "big") + b"\x00\x00\x00\x02{}")
        assert read_all(connection) == b""


@pytest.mark.parametrize("first", [b"P", b"7", b" ", b"\x02", b"\xff", b"{"])
def test_anything_else_is_refused_once(plain: BrokerProcess, first: bytes) -> None:
    """RD-024: one answer in text, then the end."""
    with plain.connect() as connection:
        connection.sendall(first)
        answer = read_all(connection)
        assert answer.startswith(b"result 400 ")
        assert f"{first[0]:#04x}".encode() in answer


def test_silence_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """RD-024: a connection that says nothing is closed after the handshake time."""
    with BrokerProcess(tmp_path / "data", *QUICK) as broker:
        started = time.monotonic()
        with broker.connect() as connection:
            assert read_all(connection) == b""
        assert time.monotonic() - started >= 0.15


def test_tls_without_a_certificate_is_refused(plain: BrokerProcess) -> None:
    """RD-024: the connection is closed, and the broker says why."""
    context = ssl.create_default_context()
    with plain.connect() as connection, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(connection, server_hostname="127.0.0.1")
    assert "tls_certificate" in plain.stderr()


def test_both_protocols_through_tls(secured: Secured) -> None:
    """RD-024: after the handshake the first byte decides again; long bodies pass both ways."""
    broker, context = secured
    with context.wrap_socket(broker.connect(), server_hostname="127.0.0.1") as connection:
        sent = ask(connection, Request.SEND_MESSAGE_V2, send_fields("secret"), LONG_BODY)
        assert sent.code == Response.SUCCESS
        pulled = ask(connection, Request.PULL_MESSAGE, pull_fields("secret"))
        assert LONG_BODY in pulled.body
    with context.wrap_socket(broker.connect(), server_hostname="127.0.0.1") as connection:
        connection.sendall(b"get secret g 0 0 1000000 1\r\nquit\r\n")
        assert LONG_BODY in read_all(connection)


def test_plain_connections_beside_tls(secured: Secured) -> None:
    """RD-024: a certificate permits TLS on every port, it does not demand it."""
    with secured.broker.connect() as connection:
        connection.sendall(b"version 1\r\nquit\r\n")
        assert read_all(connection).startswith(b"result 200 ")


def test_a_broken_handshake_harms_nobody_else(secured: Secured) -> None:
    """RD-024: garbage after the first byte of a handshake ends that connection only."""
    broker, context = secured
    with broker.connect() as broken:
        broken.sendall(b"\x16\x03\x01\x00\x05" + bytes(200))
        broken.settimeout(SOCKET_TIMEOUT_S)
        assert b"result" not in read_all(broken)
    with context.wrap_socket(broker.connect(), server_hostname="127.0.0.1") as connection:
        connection.sendall(b"version 1\r\nquit\r\n")
        assert read_all(connection).startswith(b"result 200 ")
