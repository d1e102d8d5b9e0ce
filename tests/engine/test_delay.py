"""Delayed messages: when they are delivered, in which order, with which fields, and exactly once through kills."""

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import COMPACT, Request, Response
from metaq.protocol.remoting.fastjson import decode
from metaq.protocol.remoting.headers import CreateTopic, Int32, encode_header
from metaq.store.checkpoint import LIVE_NAME
from tests.support import admin
from tests.support.broker import BrokerProcess, wait_until
from tests.support.messages import BORN_MS, count, pairs_of, records, send, send_header, sent
from tests.support.remoting import RemotingClient

DEADLINE_S: Final = 60.0
TOPIC: Final = "later"
PARKED: Final = "SCHEDULE_TOPIC_XXXX"
LEVEL_MS: Final = {1: 1000, 2: 5000}


def delayed(client: RemotingClient, body: bytes, level: int, *, partition: int = 0, pairs: str = "", flag: int = 0) -> int:
    """Send without waiting for the answer."""
    return send(client, send_header(TOPIC, f"{pairs}DELAY\x01{level}\x02", partition=partition, flag=flag), body)


def create(client: RemotingClient, topic: str) -> None:
    """A topic that a kill does not take back."""
    four = Int32(4)
    header = CreateTopic(topic, "TBW102", four, four, Int32(6))
    assert client.call(Request.UPDATE_AND_CREATE_TOPIC, encode_header(header)).code == Response.SUCCESS


def at_least(client: RemotingClient, partition: int, wanted: int) -> bool:
    return count(client, TOPIC, partition) >= wanted


def test_a_delayed_message_comes_in_its_time_as_it_was_sent(tmp_path: Path) -> None:
    """SG-075: the copy is the message sent, delivered to its partition when its level says, and not before."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        asked = int(time.time() * 1000)  # store times are whole milliseconds
        fields = sent(client, delayed(client, b"five", 2, partition=3, pairs="TAGS\x01t\x02KEYS\x01k\x02", flag=7))
        assert fields["queueId"] == "3"
        sent(client, delayed(client, b"one", 1, partition=3, pairs="WAIT\x01true\x02"))
        sent(client, send(client, send_header(TOPIC, partition=3), b"now"))
        wait_until(partial(at_least, client, 3, 3), DEADLINE_S, "all three are there")
        found = {bytes(record.body): record for record in records(client, TOPIC, 3)}
        now, one, five = found[b"now"], found[b"one"], found[b"five"]
        assert one.store_ms >= asked + 1000
        assert five.store_ms >= asked + 5000
        kept = pairs_of(five)
        assert kept.pop("METAQ_SCHEDULED") == "2:0"
        assert kept == {"DELAY": "2", "TAGS": "t", "KEYS": "k", "REAL_TOPIC": TOPIC, "REAL_QID": "3"}
        assert (five.flag, five.born_ms, five.reconsume_times, five.partition) == (7, BORN_MS, 0, 3)
        assert five.born_host == now.born_host
        offsets = client.call(Request.GET_ALL_DELAY_OFFSET, serialization=COMPACT)
        assert decode(offsets.body) == {"offsetTable": {1: 1, 2: 1}}


def test_what_a_delay_cannot_be(tmp_path: Path) -> None:
    """SG-075: a level above the last one is the last one; other delays, and the mark of copies, are not for senders."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        sent(client, delayed(client, b"late", 99))
        assert [bytes(record.body) for record in records(client, PARKED, 17)] == [b"late"]
        for pairs in ("DELAY\x01soon", f"DELAY\x011\x02a\x01{'x' * 32_700}"):
            answer = client.response(send(client, send_header(TOPIC, pairs), b"x"))
            assert answer.code == Response.MESSAGE_ILLEGAL
        sent(client, send(client, send_header(TOPIC, "METAQ_SCHEDULED\x011:5\x02a\x01b\x02"), b"forged"))
        assert pairs_of(records(client, TOPIC)[0]) == {"a": "b"}
        answer = client.response(send(client, send_header(PARKED, ""), b"x"))
        assert answer.code == Response.NO_PERMISSION


@pytest.mark.slow
def test_a_message_whose_topic_was_deleted_is_dropped(tmp_path: Path) -> None:
    """SG-075: its topic's messages are gone, and so is it, also if none was there yet; those after it are delivered."""
    with BrokerProcess(tmp_path / "data") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            sent(client, send(client, send_header("gone", "DELAY\x014"), b"x"))  # after the restart
            sent(client, delayed(client, b"stays", 4))
        assert broker.terminate() == 0
        broker.start()
        with RemotingClient(broker.host, broker.port) as client:
            assert client.call(Request.DELETE_TOPIC_IN_BROKER, {"topic": "gone"}).code == Response.SUCCESS
            wait_until(partial(at_least, client, 0, 1), DEADLINE_S, "the other one is delivered")
            assert "delayed message dropped delay_level=4 ordinal=0 reason=the topic gone was deleted" in broker.stderr()
            assert client.call(Request.GET_ALL_DELAY_OFFSET).body == b'{"offsetTable":{4:2}}'


def test_lost_positions_are_found_again(tmp_path: Path) -> None:
    """SG-075: without the file, or with a torn one, the copies in the log tell what is delivered."""
    path = tmp_path / "data" / "config" / "delayOffset.json"
    spoils: list[Callable[[], object]] = [path.unlink, partial(path.write_bytes, b'{"crc')]
    with BrokerProcess(tmp_path / "data") as broker:
        for number, spoil in enumerate(spoils, 1):
            with RemotingClient(broker.host, broker.port) as client:
                sent(client, delayed(client, b"x", 1))
                sent(client, delayed(client, b"y", 18))
                wait_until(partial(at_least, client, 0, number), DEADLINE_S, "it is delivered")
            assert broker.terminate() == 0
            spoil()
            path.with_name(f"{path.name}.bak").unlink(missing_ok=True)
            broker.start()
            with RemotingClient(broker.host, broker.port) as client:
                offsets = client.call(Request.GET_ALL_DELAY_OFFSET).body
                assert offsets == b'{"offsetTable":{1:%d,18:0}}' % number
                assert count(client, TOPIC) == number


def test_a_copy_that_a_power_cut_has_torn_is_made_again(tmp_path: Path) -> None:
    """SG-075: those behind it may have survived. They come twice, in order, so that none is lost, and once is enough."""
    with BrokerProcess(tmp_path / "data") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            for number in range(4):
                sent(client, delayed(client, b"%d" % number, 1))
            wait_until(partial(at_least, client, 0, 4), DEADLINE_S, "all are delivered")
            torn = records(client, TOPIC)[1]
        broker.kill()
        with (tmp_path / "data" / "commitlog" / f"{0:020d}").open("r+b") as segment:
            segment.seek(torn.log_offset)
            segment.write(bytes(torn.size))
        for _ in range(2):
            (tmp_path / "data" / LIVE_NAME).unlink()
            broker.start()
            with RemotingClient(broker.host, broker.port) as client:
                wait_until(partial(at_least, client, 0, 7), DEADLINE_S, "those behind it come again")
                assert client.call(Request.GET_ALL_DELAY_OFFSET).body == b'{"offsetTable":{1:4}}'
                copies = [bytes(record.body) for record in admin.records(admin.pull(client, TOPIC, 0))]
                assert copies == [b"0", b"2", b"3", b"1", b"2", b"3"]
            broker.kill()


class Controlled(BrokerProcess):
    """A broker whose clock a test sets for its next start."""

    program = ("tests.support.controlled",)

    def restart_later(self, seconds: int) -> None:
        """Start again with a clock that is so much ahead of the machine's."""
        self.data.with_name("clock").write_text(str(seconds * 1000), "ascii")
        self.restart()


@pytest.mark.parametrize("seconds", [2 * 3600 - 2, -7200])
def test_when_the_clock_is_set(tmp_path: Path, seconds: int) -> None:
    """SG-075: two hours later it is due; so it is when the clock was set back by more than a level can explain."""
    with Controlled(tmp_path / "data", durability="disk") as broker:
        with RemotingClient(broker.host, broker.port) as client:
            sent(client, delayed(client, b"x", 18))
            assert count(client, TOPIC) == 0
        broker.restart_later(seconds)
        with RemotingClient(broker.host, broker.port) as client:
            wait_until(partial(at_least, client, 0, 1), DEADLINE_S, "it is delivered")


def test_on_a_full_disk_it_waits(tmp_path: Path) -> None:
    """SG-075: what is due is not lost while there is no room, and comes when there is, also to a topic that a kill undid."""
    with BrokerProcess(tmp_path / "data") as broker, RemotingClient(broker.host, broker.port) as client:
        sent(client, delayed(client, b"x", 2))
        sent(client, delayed(client, b"y", 2))
    full = BrokerProcess(tmp_path / "data", "--least-free-bytes", str(1 << 60))
    with full:
        wait_until(lambda: "delayed messages wait, tried again delay_level=2" in full.stderr(), DEADLINE_S, "it says so")
    broker = BrokerProcess(tmp_path / "data")
    with broker, RemotingClient(broker.host, broker.port) as client:
        wait_until(partial(at_least, client, 0, 2), DEADLINE_S, "both are delivered")
        assert [bytes(record.body) for record in records(client, TOPIC)] == [b"x", b"y"]


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["memory", "disk"])
def test_each_is_delivered_once_and_in_order_through_kills(tmp_path: Path, durability: str) -> None:
    """SG-075: killed or stopped while it delivers, again and again, the broker loses, doubles and hurries none of a level."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    acknowledged: dict[int, list[bytes]] = {level: [] for level in LEVEL_MS}
    with BrokerProcess(tmp_path / "data", durability=durability) as broker:
        for number in range(5):
            with RemotingClient(broker.host, broker.port) as client:
                create(client, TOPIC)
                opaques = []
                for index in range(300):
                    level = 1 + index % 3 // 2
                    body = f"{number}.{index}".encode()
                    opaques.append(delayed(client, body, level, partition=level))  # each level has a partition of its own
                    acknowledged[level].append(body)
                for opaque in opaques:
                    sent(client, opaque)
                level = chance.choice((1, 1, 2))
                wanted = chance.randint(1, len(acknowledged[level]))
                wait_until(partial(at_least, client, level, wanted), DEADLINE_S, "some are delivered")
            if chance.random() < 0.3:
                assert broker.terminate() == 0
            broker.restart()
        with RemotingClient(broker.host, broker.port) as client:
            for level, bodies in acknowledged.items():
                wait_until(partial(at_least, client, level, len(bodies)), DEADLINE_S, "all are delivered")
                copies, parked = records(client, TOPIC, level), records(client, PARKED, level - 1)
                assert [bytes(copy.body) for copy in copies] == bodies
                for source, copy in zip(parked, copies, strict=True):
                    assert copy.store_ms - source.store_ms >= LEVEL_MS[level]
                    assert pairs_of(copy)["METAQ_SCHEDULED"] == f"{level}:{source.queue_offset}"
