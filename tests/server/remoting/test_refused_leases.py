"""Pops that wait no longer, and acks that are refused: the handlers alone."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.engine.tables.groups import Group
from metaq.errors import DiskFailed, DiskFull, StoreError
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, UnregisterClient
from metaq.protocol.remoting.leases.acks import BatchAck, acks_of, encode_batch_ack
from metaq.protocol.remoting.leases.pop import ALL_QUEUES, Notification, PopMessage
from metaq.store.files.disk import RealDisk, RealFile
from tests.server.remoting.test_pops import GROUP, INVISIBLE_MS, TOPIC, Consumer
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.inprocess import Remoting


class BreakingFile(RealFile):
    """A file to which nothing is written while the disk has an error."""

    __slots__ = ("_disk",)

    def __init__(self, path: Path, fd: int, disk: "BreakingDisk") -> None:
        super().__init__(path, fd)
        self._disk = disk

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        if self._disk.error is not None:
            raise self._disk.error
        super().write(data, offset)


class BreakingDisk(RealDisk):
    """The real one with such files."""

    error: StoreError | None = None

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)  # which closes its own descriptor
        return BreakingFile(path, os.dup(plain._fd), self)


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    consumer = Consumer(tmp_path / "data")
    yield consumer
    consumer.parts.close()


def test_pops_of_a_client_that_unregisters_wait_no_longer(consumer: Consumer) -> None:
    """E-08: each is answered as at the end of its time; those of others, and of its other groups, go on."""
    other = Remoting(consumer.parts)
    header = PopMessage(GROUP, TOPIC, Int32(ALL_QUEUES), Int32(8), INVISIBLE_MS, 60_000, Int32(0))
    notice = Notification(GROUP, TOPIC, Int32(0), 60_000, 0)
    for client, code, asked in (
        (consumer.client, Request.POP_MESSAGE, header),
        (consumer.client, Request.NOTIFICATION, notice),
        (consumer.client, Request.POP_MESSAGE, header._replace(consumer_group="audit")),
        (other, Request.POP_MESSAGE, header),
    ):
        client.send(code, asked)
    consumer.parts.end_turn()
    assert consumer.leasing.lines.count == 4
    consumer.client.send(Request.UNREGISTER_CLIENT, UnregisterClient("a@1", None, GROUP))
    consumer.parts.end_turn()
    codes = [answer.code for answer in consumer.client.answers()]
    assert sorted(codes) == [Response.SUCCESS, Response.SUCCESS, Response.POLLING_TIMEOUT]
    assert (consumer.leasing.lines.count, other.answers()) == (2, [])
    consumer.put("a")
    assert len(consumer.client.answers()) == len(other.answers()) == 1


def test_nothing_is_acknowledged_after_a_failed_sync(consumer: Consumer) -> None:
    """E-08, F-12: what is lost with the restart that must follow."""
    consumer.put("a", "b")
    (_, first), (_, second) = consumer.popped()
    batch = encode_batch_ack(BatchAck(consumer.broker_name, tuple(acks_of(GROUP, TOPIC, [second]))))
    consumer.parts.store.failure = DiskFailed("cannot sync")
    assert consumer.ack(first) != Response.SUCCESS
    assert consumer.change(first, 0).code != Response.SUCCESS
    answer = consumer.ask(Request.BATCH_ACK_MESSAGE, body=batch)
    assert answer is not None and answer.code != Response.SUCCESS
    consumer.parts.store.failure = None
    assert consumer.ack(first) == consumer.ack(second) == Response.SUCCESS


@pytest.mark.parametrize(("error", "is_kept"), [(DiskFull("full"), True), (DiskFailed("broken"), False)])
def test_an_ack_is_refused_whose_append_fails(tmp_path: Path, error: StoreError, is_kept: bool) -> None:
    """E-08, F-12: but for lack of room it is kept in memory."""
    disk = BreakingDisk()
    consumer = Consumer(tmp_path / "data", disk=disk)
    consumer.put("a")
    ((_, receipt),) = consumer.popped()
    disk.error = error
    assert (consumer.ack(receipt) == Response.SUCCESS) == is_kept
    disk.error = None
    consumer.parts.close()


def test_an_ack_that_must_be_safe_is_refused_while_the_disk_is_full() -> None:
    """It is in memory only, however often it is sent, until the leases are in the log."""
    disk = FaultyDisk(random.Random(0))
    consumer = Consumer(DATA, disk=disk)
    consumer.parts.context.groups.put(Group(GROUP, attributes={"lease_acks": "safe"}))
    consumer.put("a", "b", "c", "d")
    disk.fill()
    consumer.parts.store.sweep()
    (_, single), (_, batched), (_, changed), (_, rejected) = consumer.popped()
    batch = encode_batch_ack(BatchAck(consumer.broker_name, tuple(acks_of(GROUP, TOPIC, [batched]))))
    assert consumer.ack(single) == consumer.ack(single) == Response.SERVICE_NOT_AVAILABLE
    answers = [consumer.ask(Request.BATCH_ACK_MESSAGE, body=batch) for _ in range(2)]
    answers += [consumer.change(changed, 0), consumer.change(rejected, -1)]
    assert [None if answer is None else answer.code for answer in answers] == [Response.SERVICE_NOT_AVAILABLE] * 4
    disk.full_from = None
    consumer.parts.store.sweep()
    consumer.keeper.tend()
    consumer.parts.end_turn()
    assert consumer.ack(single) == consumer.ack(rejected) == Response.SUCCESS
    disk.killed()
    other = Consumer(DATA, disk=disk)
    assert other.leasing.leases.of(GROUP, TOPIC)[0].ordinals() == [2]
