"""A master that is lost just after it gave a message: the next one does not give it again before its lease ends.

So it is for groups with safe acks, at a level that rests on replicas (docs/leases.md).
"""

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest

from metaq.client.text.textclient import TextClient, parse_stats
from metaq.errors import ClientError, Refused
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, encode_header
from metaq.protocol.remoting.leases.pop import ALL_QUEUES, FROM_FIRST, PopMessage
from metaq.protocol.text.replies import UNAVAILABLE
from tests.support.admin import ask, connect, create_topic, records
from tests.support.broker import BrokerProcess, wait_until
from tests.support.cluster import DEADLINE_S, Cluster, ReplicaProcess, wait_caught_up

TOPIC: Final = "tasks"
GROUP: Final = "workers"
LEASE: Final = timedelta(seconds=20)
"""Longer than a failover takes on a busy machine."""
ALONE: Final = ("--min-in-sync", "1", "--replica-lag-ms", "60000", "--replica-timeout-ms", "60000")
"""The next master goes on alone, and a slave that hears nothing is in sync for as long as the test takes."""
UNDER_WAY_S: Final = 1.0
"""How long what the master sends is on its way to the slave."""


def set_up(master: ReplicaProcess) -> None:
    """Make a topic with one message, and a group whose acks are safe."""
    with connect(master) as client:
        create_topic(client, TOPIC)
        group = {"groupName": GROUP, "attributes": {"+lease_acks": "safe"}}
        ask(client, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, fastjson.encode(group))
    with TextClient(master.host, master.port) as text:
        text.put(TOPIC, b"task")


def pushed(master: BrokerProcess, lease: timedelta, stack: ExitStack) -> bytes:
    client = stack.enter_context(TextClient(master.host, master.port, timeout_s=DEADLINE_S))
    stack.enter_context(contextlib.suppress(ClientError))  # when it ends, its broker is lost
    subscription = stack.enter_context(client.subscribe(TOPIC, GROUP, invisible_s=lease.total_seconds()))
    message = subscription.receive(DEADLINE_S)
    assert message is not None
    return message.body


def popped(master: BrokerProcess, lease: timedelta, stack: ExitStack) -> bytes:
    client = stack.enter_context(TextClient(master.host, master.port, timeout_s=DEADLINE_S))
    return client.pop(TOPIC, GROUP, invisible=lease)[0].body


def popped_by_remoting(master: BrokerProcess, lease: timedelta, stack: ExitStack) -> bytes:
    client = stack.enter_context(connect(master))
    lease_ms = round(lease.total_seconds() * 1000)
    header = PopMessage(GROUP, TOPIC, Int32(ALL_QUEUES), Int32(1), lease_ms, 0, Int32(FROM_FIRST))
    answer = client.call(Request.POP_MESSAGE, encode_header(header))
    assert answer.code == Response.SUCCESS, answer.remark
    return bytes(records(answer)[0].body)


Way = Callable[[BrokerProcess, timedelta, ExitStack], bytes]
WAYS: Final = (pushed, popped, popped_by_remoting)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_was_given_is_not_given_by_the_next_master_before_its_lease_ends(tmp_path: Path, way: Way) -> None:
    """The slave hears of everything late, and what is on its way to it when the master is killed is lost."""
    with Cluster(tmp_path, *ALONE) as cluster, ExitStack() as stack:
        master, slave, proxy = cluster.proxied_pair()
        set_up(master)
        wait_caught_up(master, slave)
        proxy.delay("down", UNDER_WAY_S)
        began = time.monotonic()
        assert way(master, LEASE, stack) == b"task"
        proxy.cut()
        master.kill()
        slave.promote()
        with TextClient(slave.host, slave.port, timeout_s=DEADLINE_S) as text:
            (again,) = text.pop(TOPIC, GROUP, wait=2 * LEASE)
            assert (again.body, again.attempt) == (b"task", 2)
            assert time.monotonic() - began >= LEASE.total_seconds()


@pytest.mark.parametrize("way", WAYS)
def test_nobody_gets_a_message_whose_lease_only_the_master_has(tmp_path: Path, way: Way) -> None:
    """It waits for the slave in sync; when the master is lost meanwhile, the next one gives it for the first time."""
    with Cluster(tmp_path, *ALONE) as cluster, ExitStack() as stack:
        master, slave, proxy = cluster.proxied_pair()
        set_up(master)
        wait_caught_up(master, slave)
        proxy.drop("down")
        given: list[bytes] = []

        def take() -> None:
            # its connection is lost, or it is told that it gets nothing
            with contextlib.suppress(ClientError, OSError, AssertionError):
                given.append(way(master, LEASE, stack))

        taking = threading.Thread(target=take)
        taking.start()
        with TextClient(master.host, master.port) as text:
            wait_until(lambda: parse_stats(text.stats())["leases_open"] == "1", DEADLINE_S, "the message is leased")
            text.stats()  # an answer that waits for nothing has been sent by now
        proxy.cut()
        master.kill()
        taking.join()
        assert given == []
        slave.promote()
        with TextClient(slave.host, slave.port, timeout_s=DEADLINE_S) as text:
            (first,) = text.pop(TOPIC, GROUP, wait=LEASE)
            assert (first.body, first.attempt) == (b"task", 1)


def test_nothing_is_leased_while_too_few_replicas_are_in_sync(tmp_path: Path) -> None:
    """And that is said, but to groups whose acks are not safe."""
    with Cluster(tmp_path) as cluster:
        master, slave = cluster.pair()
        set_up(master)
        wait_caught_up(master, slave)
        slave.kill()
        master.wait_for(in_sync=[1])
        with TextClient(master.host, master.port, timeout_s=DEADLINE_S) as text:
            with pytest.raises(Refused, match=r"too few are in sync \(min_in_sync\); the group has lease_acks=safe") as refused:
                text.pop(TOPIC, GROUP)
            assert refused.value.code == UNAVAILABLE
            assert [message.attempt for message in text.pop(TOPIC, "others")] == [1]
            with text.subscribe(TOPIC, GROUP) as subscription:
                slave.start()
                message = subscription.receive(DEADLINE_S)
            assert message is not None
            assert message.attempt == 1
