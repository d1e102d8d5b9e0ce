"""`metaq debug-bundle`: what the bundle contains, and what it must never contain."""

import errno
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import metaq
from metaq import TextClient
from metaq.cli.doctor.bundle import HIDDEN, LOG_BYTES, _is_here, redact
from metaq.form import FORM
from tests.support.broker import BrokerProcess

SECRET = "correct-horse-battery"


def bundle(folder: Path, *arguments: str, code: int = 0) -> dict[str, str]:
    """The files of a bundle by name, without the folder that all are in."""
    command = [sys.executable, "-m", "metaq", "debug-bundle", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    name = done.stdout.strip()
    assert name.startswith("metaq-debug-") and name.endswith(".tar.gz")
    with tarfile.open(folder / name) as archive:
        assert {Path(member.name).parent.name for member in archive.getmembers()} == {name.removesuffix(".tar.gz")}
        files = {}
        for member in archive.getmembers():
            stream = archive.extractfile(member)
            assert stream is not None
            files[Path(member.name).name] = stream.read().decode()
    return files


def test_a_bundle_holds_what_shows_why_a_broker_misbehaves(tmp_path: Path) -> None:
    """E-31: settings, statistics, stacks, versions, disk use and log lines, each in a file."""
    with BrokerProcess(tmp_path / "data", "--max-topics", "77") as broker:
        with TextClient(broker.host, broker.port) as client:
            client.put("orders", b"one")
        files = bundle(tmp_path, "--broker", broker.address, "--log", str(broker.log))
    assert files.keys() == {
        "versions.txt",
        "broker-version.txt",
        "settings.ini",
        "disk.txt",
        "log.txt",
        "problems.txt",
        "stats.txt",
        "stats-topics.txt",
        "stats-offsets.txt",
        "stats-realtime.txt",
        "stats-stacks.txt",
    }
    assert files["problems.txt"] == ""
    assert "max_topics=77\n" in files["settings.ini"]
    assert f"metaq {metaq.__version__} ({FORM})\n" in files["versions.txt"] and "\ngevent 2" in files["versions.txt"]
    assert "orders" in files["stats-topics.txt"]
    assert "sync_forever" in files["stats-stacks.txt"] and "duties.py" in files["stats-stacks.txt"]
    assert f"folder path={tmp_path}/data files=" in files["disk.txt"] and "disk total=" in files["disk.txt"]
    assert "INFO metaq.server.broker recovered" in files["log.txt"]


def test_a_bundle_holds_no_secret_and_no_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-31: whatever was planted where it looks."""
    log = tmp_path / "broker.log"
    lines = [f"user added password={SECRET}", f'{{"event": "x", "api_key": "{SECRET}"}}', f"proxy http://me:{SECRET}@host/"]
    lines += [
        f"header Authorization: Bearer {SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ]
    log.write_text("\n".join(lines) + "\nthe last line\n")
    monkeypatch.setenv("METAQ_TOKEN", SECRET)
    monkeypatch.setenv("SOME_PASSWORD", SECRET)
    with BrokerProcess(tmp_path / "data") as broker:
        with TextClient(broker.host, broker.port) as client:
            client.put("bodies", f"body {SECRET}".encode(), attribute=SECRET[:7])
            client.get("bodies", group="g", partition=0, position=0)
        files = bundle(tmp_path, "--broker", broker.address, "--log", str(log))
    assert "the last line" in files["log.txt"] and HIDDEN in files["log.txt"]
    for name, text in files.items():
        assert SECRET not in text, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("password=abc next=1", "password=(hidden) next=1"),
        ("db_password : abc", "db_password : (hidden)"),
        ("'secretKey': 'a b c', x", "'secretKey': (hidden), x"),
        ("Authorization: Basic YTpi", "Authorization: (hidden)"),
        ("https://u:p@h:1/x", "https://(hidden)@h:1/x"),
        ("-----BEGIN PRIVATE KEY-----\nMII", "(hidden)"),
        ("token: |\n  abc\n\n    def\nnext: 1", "token: (hidden)\nnext: 1"),
        ("a:\n  - 'token': !!str >2-  # why\n      abc\n      def\n    next: 1", "a:\n  - 'token': (hidden)\n    next: 1"),
        ("note: |\n  abc\n", "note: |\n  abc\n"),
        ("tls_key=/etc/metaq/key.pem", "tls_key=/etc/metaq/key.pem"),
        ("put_failed=3 topic=orders max_topics=5", "put_failed=3 topic=orders max_topics=5"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, expected: str) -> None:
    """E-31: and nothing else."""
    assert redact(text) == expected


def test_an_address_is_of_this_machine_when_it_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """E-31: a machine without IPv6 has the name localhost all the same."""
    real = socket.socket

    def without_ipv6(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, kind)

    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", without_ipv6)
    assert _is_here("localhost")
    found[1] = (*found[1][:4], ("192.0.2.1", 0))  # for documents: nobody's
    assert not _is_here("localhost")


def test_a_broker_that_does_not_answer(tmp_path: Path) -> None:
    """E-31: then there is what can be had without it, the reason, and exit code 1."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_bytes(b"x" * 1000)
    log = tmp_path / "broker.log"
    log.write_bytes(b"first\n" + b"x" * LOG_BYTES + b"\nlast\n")
    arguments = ("--broker", "127.0.0.1:1", "--data", str(tmp_path / "data"), "--log", str(log))
    files = bundle(tmp_path, *arguments, code=1)
    assert "broker: cannot connect to 127.0.0.1:1" in files["problems.txt"]
    assert "files=1 bytes=1000" in files["disk.txt"]
    assert files["log.txt"] == "last\n"
    files = bundle(tmp_path, "--broker", "127.0.0.1:1", "--log", str(tmp_path / "absent"), code=1)
    assert "log.txt: " in files["problems.txt"] and files.keys() == {"versions.txt", "problems.txt"}
