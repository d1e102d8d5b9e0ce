"""The programs in docs/transactions.md run as they stand, with a real PostgreSQL, and print what is shown."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from metaq.client import TextClient
from tests.docs.examples import ROOT, fences
from tests.support.broker import BrokerProcess
from tests.xa.postgres import Postgres

DOCUMENT: Final = "docs/transactions.md"
DATABASE: Final = "postgresql+psycopg://localhost/shop"
BROKER: Final = "127.0.0.1:8123"
REGISTRY: Final = "127.0.0.1:9876"
DEADLINE_S: Final = 120.0

pytestmark = pytest.mark.partner("postgres")


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with Postgres() as postgres:
        yield postgres


def section(title: str, kind: str) -> str:
    """The fences of one kind under a heading, as one text."""
    heading = (ROOT / DOCUMENT).read_text("utf-8").splitlines().index(f"## {title}") + 1
    following = [number for number, line in headings() if number > heading]
    end = min(following, default=1 << 30)
    found = [fence for fence in fences(DOCUMENT, kind) if heading < int(fence.place.rpartition(":")[2]) < end]
    assert found, f"{DOCUMENT} has no {kind} under {title}"
    return "\n".join(fence.text for fence in found)


def headings() -> list[tuple[int, str]]:
    lines = (ROOT / DOCUMENT).read_text("utf-8").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if line.startswith("## ")]


@pytest.mark.parametrize(("title", "message"), [("With PostgreSQL", b"paid 2003"), ("An outbox", b"paid 2004")])
def test_a_program(broker: BrokerProcess, postgres: Postgres, title: str, message: bytes) -> None:
    """MQ-078: a row in the database, a message in the topic, and nothing left to recover."""
    program = section(title, "python")
    for shown, real in ((DATABASE, postgres.url), (BROKER, broker.address), (REGISTRY, broker.registry)):
        program = program.replace(shown, real)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, section(title, "text")), done.stderr
    with TextClient(broker.host, broker.port) as client:
        partitions = [client.get("orders", partition=number).messages for number in range(client.create("orders", 1))]
    assert [found.body for messages in partitions for found in messages] == [message]
    with postgres.connect() as connection:
        assert connection.execute("SELECT number FROM orders").fetchall() == [(int(message.split()[1]),)]
