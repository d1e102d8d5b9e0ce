"""An unreadable message costs no other message: with every kind of consumer, the broker in memory and a real one."""

import asyncio
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import metaq.aio
from metaq.client import Client, Model, PushConsumer, ReceivedMessage, connect
from metaq.client.consuming import fetching, push
from metaq.client.consuming.consumer import Inbox
from metaq.client.consuming.fetching import Fetcher
from metaq.client.consuming.progress import Progress
from metaq.client.retries import Backoff
from metaq.errors import ChecksumMismatch, DecodeError
from metaq.message import DEAD_PREFIX
from metaq.protocol.inflating import inflated
from metaq.testing import InMemoryBroker
from metaq.testing.log import Letter
from tests.client.poison import POISON, ZLIB, send_packed
from tests.client.test_consumers import DEADLINE_S, FIRST, Heard, take
from tests.support.broker import BrokerProcess, wait_until

GOOD = [b"before", b"between", b"after"]
PACKERS: dict[int, Callable[[bytes], bytes]] = {
    1: zlib.compress,
    0x301: zlib.compress,
    0x101: lz4.frame.compress,
    0x201: zstandard.compress,
    0x601: bytes,
}
_STREAMS = 0x201


def send_all(client: Client) -> None:
    """Good messages, and every kind of poison between them, in one partition."""
    client.admin().create_topic("orders", 1)
    producer = client.producer()
    producer.send("orders", GOOD[0])
    for number, (body, sys_flag) in enumerate(POISON.items()):
        send_packed(client, "orders", body, sys_flag)
        if number == 1:
            producer.send("orders", GOOD[1])
    producer.send("orders", GOOD[2])


def check(messages: list[ReceivedMessage]) -> None:
    """Each is there, what is not readable as it was sent."""
    assert {message.body for message in messages if message.error is None} == set(GOOD)
    assert {message.body for message in messages if message.error is not None} == set(POISON)


# -- inflating --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 32))
def test_a_body_is_inflated_or_refused(seed: int) -> None:
    """SG-098: whatever its bytes are and whatever is said about them, within the limit."""
    rng = Random(seed)
    kind = rng.choice(list(PACKERS))
    body = rng.choice([rng.randbytes(rng.randrange(50)), bytes(rng.randrange(5000))])
    packed = bytearray(PACKERS[kind](body))
    if kind == _STREAMS and rng.random() < 0.5:  # as Java writes them: the size is not said
        stream = zstandard.ZstdCompressor().compressobj()
        packed = bytearray(stream.compress(body) + stream.flush())
    change = rng.choice(["none", "cut", "mutate", "limit"])
    most = 10_000
    if change == "cut" and packed:
        del packed[rng.randrange(len(packed)) :]
    elif change == "mutate" and packed:
        packed[rng.randrange(len(packed))] = rng.randrange(256)
    elif change == "limit":
        most = max(1, len(body) - 1)
    try:
        found = inflated(bytes(packed), kind, most)
    except DecodeError:
        assert change != "none" or kind == 0x601
    else:
        assert len(found) <= most
        assert found == body or change == "mutate"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-098: and how to get it."""
    for module, kind in (("lz4", 0x101), ("lz4.frame", 0x101), ("zstandard", 0x201)):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(DecodeError, match=r"pip install 'metaq-broker\[compression\]'"):
            inflated(b"", kind)


# -- consumers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["consumer", "pull", "broadcast", "admin", "aio consumer", "aio pull"])
def test_whoever_asks_for_messages_gets_it_with_an_error(client: Client, address: str, kind: str, tmp_path: Path) -> None:
    """SG-118, SG-120, P44: and all others."""
    send_all(client)
    count = len(GOOD) + len(POISON)
    if kind == "consumer":
        with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
            check(take(consumer, count))
    elif kind == "pull":
        found: list[ReceivedMessage] = []
        with client.pull_consumer("orders") as reader:
            reader.assign(reader.partitions())
            deadline = time.monotonic() + DEADLINE_S
            while len(found) < count and time.monotonic() < deadline:
                found += reader.poll(1.0)
        check(found)
    elif kind == "broadcast":
        model = Model.BROADCASTING
        with client.consumer("orders", "all", model=model, consume_from=FIRST, offsets_folder=tmp_path) as consumer:
            check(take(consumer, count))
    elif kind == "admin":
        admin = client.admin()
        reader = client.pull_consumer("orders")
        check([message for queue in reader.partitions() for message in admin.read(queue, 0, reader.end_offset(queue))])
    else:
        asyncio.run(asyncio.wait_for(_read(address, kind, count), DEADLINE_S))


async def _read(address: str, kind: str, count: int) -> None:
    found: list[ReceivedMessage] = []
    async with metaq.aio.connect(address) as client:
        if kind == "aio consumer":
            async with await client.consumer("orders", "billing", consume_from=FIRST) as consumer:
                while len(found) < count:
                    message = await consumer.receive(timeout_s=DEADLINE_S)
                    assert message is not None
                    found.append(message)
        else:
            async with client.pull_consumer("orders") as reader:
                await reader.assign(await reader.partitions())
                while len(found) < count:
                    found += await reader.poll(timeout_s=1.0)
    check(found)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_listener_never_sees_it(client: Client, address: str, ordered: bool) -> None:
    """SG-119, SG-086: it goes to the dead letters as it is stored; an ordered queue goes on."""
    send_all(client)
    heard = Heard()
    with client.listen("orders", "billing", heard, consume_from=FIRST, ordered=ordered, max_reconsume_times=0):
        wait_until(lambda: len(_dead(client)) == len(POISON), DEADLINE_S, "all poison is among the dead letters")
        heard.wait(len(GOOD))
    assert sorted(heard.bodies) == sorted(GOOD)
    dead = _dead(client)
    check([*heard.messages, *dead])
    reader = client.pull_consumer("orders", "billing")
    assert all((reader.committed(queue) or 0) == reader.end_offset(queue) for queue in reader.partitions())
    again = client.admin().replay("billing", dead[0])
    assert again.queue.topic == "%RETRY%billing"


def _dead(client: Client) -> list[ReceivedMessage]:
    client._core.routes.forget(f"{DEAD_PREFIX}billing")
    return list(client.admin().dead_letters("billing"))


def test_a_copy_is_as_unreadable_as_its_original(client: Client, memory: InMemoryBroker) -> None:
    """SG-086: when the broker that has it does not take it back, another one gets it with the same flag."""
    with connect(memory.address) as sender:
        for body, sys_flag in POISON.items():
            send_packed(sender, "orders", body, sys_flag)
        for message in memory.messages("orders"):
            body, sys_flag = message._packed()
            assert POISON[body] == sys_flag
        letter = Letter("orders", 0, zlib.compress(b"readable"), {}, sys_flag=ZLIB)
        memory._log.put(letter)
        assert memory.messages("orders")[-1]._packed() == (b"readable", 0)


def test_a_message_that_stays_damaged_comes_with_an_error(memory: InMemoryBroker, caplog: pytest.LogCaptureFixture) -> None:
    """SG-098: it is asked for twice, as it may have been damaged on its way."""
    memory.create_topic("orders", 1)
    with connect(memory.address) as client:
        for number in range(3):
            client.producer().send("orders", b"%d" % number)
        rows = memory._log.topics["orders"][0].records
        rows[1] = rows[1][:88] + b"X" + rows[1][89:]
        with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
            found = take(consumer, 3)
    assert [message.body for message in found] == [b"0", b"X", b"2"]
    assert [message.error is None for message in found] == [True, False, True]
    assert ChecksumMismatch.__name__ in caplog.text


# -- steps that fail --------------------------------------------------------------------------------------------------


class Faults:
    """Makes steps of a consumer fail, before or after they have done their work."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self._rng = Random(seed)
        self._patch = patch

    def at(self, place: object, name: str) -> None:
        """Make about one of three calls of this function fail from now on, before or after its work."""
        really = getattr(place, name)

        def work(*arguments: Any, **named: Any) -> object:
            when, error = self._rng.randrange(6), self._rng.choice([MemoryError(), RuntimeError("by chance"), RecursionError()])
            if when == 0:
                raise error
            result = really(*arguments, **named)
            if when == 1:
                raise error
            return result

        self._patch.setattr(place, name, work)


@pytest.mark.parametrize("kind", ["commit", "auto_commit", "listen", "ordered", "pull"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_step_that_fails_skips_no_message(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, kind: str, seed: int
) -> None:
    """SG-077, SG-118: whatever fails between a broker's answer and the program, nothing is committed that did not arrive."""
    monkeypatch.setattr(fetching, "READ_BACKOFF", Backoff(first=0.001))
    monkeypatch.setattr(push, "LOCAL_BACKOFF", metaq.Backoff(first=0.001))
    faults = Faults(seed, monkeypatch)
    faults.at(fetching, "decode_messages")
    faults.at(Inbox, "put")
    faults.at(Progress, "add")
    faults.at(Fetcher, "_request")
    faults.at(PushConsumer, "_finish")
    guard = threading.Lock()
    seen: dict[int, set[int]] = {}

    def got(message: ReceivedMessage) -> None:
        with guard:
            seen.setdefault(message.partition, set()).add(message.queue_offset)
            check_committed()

    def check_committed() -> None:
        for partition, offset in memory.committed("billing", "orders").items():
            assert set(range(offset)) <= seen.get(partition, set()), "what is committed has arrived"

    with connect(memory.address) as client, connect(memory.address) as sender:
        count = 0

        def arrived() -> bool:
            return sum(map(len, seen.values())) == count

        def more() -> None:
            nonlocal count
            sender.producer().send_batch("orders", [b"x"] * 5)
            sender.producer().send("orders", b"y")
            count += 6

        more()
        if kind in {"listen", "ordered"}:
            with client.listen("orders", "billing", got, consume_from=FIRST, ordered=kind == "ordered"):
                for _ in range(10):
                    more()
                    wait_until(arrived, DEADLINE_S, "all messages arrive")
        elif kind == "pull":
            with client.pull_consumer("orders", "billing") as reader:
                reader.assign(reader.partitions())
                while count < 60 or not arrived():
                    for message in reader.poll(timeout_s=1.0):
                        got(message)
                    reader.commit()
                    if count < 60 and arrived():
                        more()
        else:
            with client.consumer("orders", "billing", consume_from=FIRST, auto_commit=kind == "auto_commit") as consumer:
                while count < 60 or not arrived():
                    (message,) = take(consumer, 1)
                    got(message)
                    if kind == "commit":
                        consumer.commit()
                    if count < 60 and arrived():
                        more()
        check_committed()


# -- memory -----------------------------------------------------------------------------------------------------------

CONSUMER = """
import resource, sys
from metaq.client import ConsumeFrom, connect
with connect(sys.argv[1]) as client, client.consumer("orders", "billing", consume_from=ConsumeFrom.FIRST) as consumer:
    assert consumer.receive(timeout_s=60) is not None
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
    short = 0
    seen = {0}
    while len(seen) < int(sys.argv[2]):
        message = consumer.receive(timeout_s=60)
        seen.add(message.queue_offset)
        try:
            message.body
        except MemoryError:
            short += 1
        consumer.commit()
    print(sorted(seen))
"""


def test_bodies_that_are_large_only_together_cost_no_message(process: BrokerProcess) -> None:
    """SG-098: a pull of 228 KB that would be 224 MiB, in a process that may have 96 MiB more: each is inflated by itself."""
    bomb = zlib.compress(bytes(16 << 20))
    with connect(process.registry) as client:
        client.admin().create_topic("orders", 1)
        for _ in range(14):
            send_packed(client, "orders", bomb, ZLIB)
    command = [sys.executable, "-c", CONSUMER, process.registry, "14"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"{list(range(14))}\n", done.stderr
