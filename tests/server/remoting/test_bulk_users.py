"""Bulk fetches from a broker that has users, in the clear and over TLS."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.client import TextClient
from metaq.client.connecting.access import OPEN, Access
from metaq.client.consuming.bulk import BulkConnection
from metaq.errors import ConnectionFailed, Refused
from metaq.protocol.record import decode_record
from metaq.protocol.remoting.bulk import Bulk, BulkFetch
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.headers import Int32
from metaq.store.queues.consumequeue import UNIT
from tests.support.broker import BrokerProcess
from tests.support.tls import Certificates, issue
from tests.support.users import ADMIN, READER, TOPIC, WRITER, write_users

TIMEOUT_S: Final = 60.0
BODIES: Final = [b"%06d" % number * 20_000 for number in range(40)]
"""Nearly five MiB: an answer of many TLS records."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("broker")
    users = write_users(folder / "users.yaml")
    with BrokerProcess(folder / "data", "--users-file", str(users), *certificates.flags) as process:
        with TextClient(process.host, process.port, user=WRITER.name, password=WRITER.secret) as client:
            client.put_many(TOPIC, BODIES)
        yield process


def fetch(connection: BulkConnection) -> Bulk:
    return connection.fetch(BulkFetch(TOPIC, Int32(0), 0, Int32(1), Int32(1 << 24)))


def fetch_all(broker: BrokerProcess, access: Access, most: int) -> list[bytes]:
    """The bodies, with the next fetch asked for ahead."""
    found = []
    wanted = BulkFetch(TOPIC, Int32(0), 0, Int32(most), Int32(1 << 24))
    with BulkConnection(broker.address, TIMEOUT_S, access) as connection:
        while (bulk := connection.fetch(wanted)).units:
            wanted = wanted._replace(queue_offset=bulk.next)
            connection.prefetch(wanted)
            at = 0
            for _, size, _ in UNIT.iter_unpack(bulk.units):
                found.append(bytes(decode_record(bytes(bulk.records[at : at + size])).body))
                at += size
    return found


@pytest.mark.parametrize("tls", [False, True])
def test_a_user_that_may_read_fetches(broker: BrokerProcess, certificates: Certificates, tls: bool) -> None:
    """P47, E-05: every fetch is signed, the ones asked for ahead, too; over TLS the same bytes come."""
    trusted = str(certificates.authority) if tls else False
    assert fetch_all(broker, Access(*READER, tls=trusted), 3) == BODIES
    assert fetch_all(broker, Access(*ADMIN, tls=trusted), len(BODIES)) == BODIES


@pytest.mark.parametrize("tls", [False, True])
def test_who_may_not_read_is_told_so(broker: BrokerProcess, certificates: Certificates, tls: bool) -> None:
    """P47, E-05: nobody, who may publish only, and who has another secret; the connection stays, no secret is told."""
    trusted = str(certificates.authority) if tls else False
    for access, words in (
        (Access(tls=trusted), "anonymous may not"),
        (Access(*WRITER, tls=trusted), "writer may not"),
        (Access(READER.name, "another-secret", tls=trusted), "AccessKey 'reader': wrong signature"),
    ):
        with BulkConnection(broker.address, TIMEOUT_S, access) as connection:
            for _ in range(2):
                with pytest.raises(Refused, match=words) as refused:
                    fetch(connection)
                assert refused.value.code in {Response.NO_PERMISSION, Response.SYSTEM_ERROR}
                assert "another-secret" not in str(refused.value)


def test_a_certificate_of_somebody_else_is_not_taken(broker: BrokerProcess, tmp_path: Path) -> None:
    """E-05: nothing is asked, so nothing signed is told."""
    strange = issue(tmp_path)
    with pytest.raises(ConnectionFailed, match=f"no TLS with {broker.address}: .*certificate verify failed"):
        BulkConnection(broker.address, TIMEOUT_S, Access(*READER, tls=str(strange.authority)))


def test_a_lost_connection_is_told_over_tls(tmp_path: Path, certificates: Certificates) -> None:
    """F-KILL: as in the clear."""
    with BrokerProcess(tmp_path / "data", *certificates.flags) as process:
        with TextClient(process.host, process.port) as client:
            client.put(TOPIC, b"x")
        assert fetch_all(process, OPEN, 1) == [b"x"]
        with BulkConnection(process.address, TIMEOUT_S, Access(tls=str(certificates.authority))) as connection:
            fetch(connection)
            process.kill()
            with pytest.raises(ConnectionFailed, match=f"the connection to {process.address} is lost"):
                fetch(connection)
