"""Commands of many connections that arrive in one turn of the loop, while readers wait for the disk and retention deletes.

The broker is stopped (SIGSTOP) while the connections of a turn send, in an order drawn by the seed, and continues then: all
that they sent is there at once. Topics, groups and subscriptions are few, so that one command takes away what the next one is
about. Segments and queue files are tiny and nothing is kept, reads find nothing in memory half of the time, and connections
that are owed answers break. What must hold: the broker lives, prints no traceback, and answers each command on connections that
stay.

``python -m tests.crash.turns --seed 7 --count 100000`` runs it; a failure names the seed and the turn.
"""

import argparse
import json
import os
import random
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from metaq.protocol.remoting.codes import PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request
from metaq.protocol.remoting.frames import FrameReader, encode_request, encode_response
from metaq.protocol.remoting.headers import encode_header
from metaq.protocol.sysflag import TRANSACTION_PREPARED
from metaq.protocol.text.writing import write_get, write_line, write_offset, write_put
from tests.crash.command import Result, Violation, run_until
from tests.support.admin import fields_of
from tests.support.broker import SOCKET_TIMEOUT_S, BrokerProcess
from tests.support.messages import send_header
from tests.support.talk import ReplyReader

TURNS: Final = 60
"""With one broker."""
SPEAKERS: Final = 6
COMMANDS: Final = 6
"""Of a connection in one turn, at most."""
FLAGS: Final = (
    "--segment-bytes=65536",
    "--queue-file-bytes=256",
    "--max-message-bytes=16384",
    "--max-body-bytes=16384",
    "--keep-hours=0.00001",
    "--clean-ratio=0.000001",
    f"--ample-free-bytes={1 << 60}",
    "--retention-interval-ms=20",
    "--checkpoint-interval-ms=20",
    "--sweep-interval-ms=10",
    "--check-after-ms=0",
    "--check-interval-ms=10",
    "--max-branch-bytes=16384",
    "--force-ratio=1",
    "--refuse-ratio=1",
    "--least-free-bytes=0",
)
TOPICS: Final = ("a", "b", "%RETRY%g")
GROUPS: Final = ("g", "h")
CLIENTS: Final = ("one@1", "two@1")
XIDS: Final = tuple(f"XID:1:0{number}:0{number}:app" for number in range(3))
STEPS: Final = ("BEGIN", "PREPARE", "COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE", "ROLLBACK", "FORGET")

BREAKING: Final = 0.05
"""How often a connection breaks in a turn, while it is owed answers."""

Chance = random.Random
Said = tuple[int, dict[str, str], bytes]
"""Code, fields and body of a request."""


class Speaker:
    """One connection, which says several commands at once and takes answers when they come."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.socket = broker.connect()
        self.missing: dict[int, object] = {}
        """By opaque: commands that are not answered yet, in their order."""
        self._number = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    def say(self, chance: Chance, count: int) -> bytes:
        """So many commands."""
        raise NotImplementedError

    def take(self) -> None:
        """Take what has come."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise Violation(f"the broker closed a connection that misses {self.missing}")
        self._take(data)

    def _take(self, data: bytes) -> None:
        raise NotImplementedError


class TextSpeaker(Speaker):
    """A connection of the text protocol: answers come in the order of the commands."""

    def __init__(self, broker: BrokerProcess) -> None:
        super().__init__(broker)
        self._reader = ReplyReader()

    def _take(self, data: bytes) -> None:
        for reply in self._reader.receive(data):
            if reply.opaque != next(iter(self.missing)):
                raise Violation(f"an answer out of order: {reply}")
            del self.missing[reply.opaque]

    def say(self, chance: Chance, count: int) -> bytes:
        said = {number: self._command(chance, number) for number in (self._next() for _ in range(count))}
        self.missing.update(said)
        return b"".join(said.values())

    def _command(self, chance: Chance, opaque: int) -> bytes:
        topic, partition, place = chance.choice(TOPICS), chance.randrange(2), chance.randrange(100_000)
        match chance.randrange(6):
            case 0:
                return write_line("create", topic, chance.randrange(1, 3), opaque)
            case 1 | 2:
                key = chance.choice((None, None, *XIDS))
                return write_put(topic, partition, 0, bytes(chance.choice((1, 100, 9000))), opaque, transaction=key)
            case 3:
                return write_get(topic, chance.choice(GROUPS), partition, place, 20_000, opaque, chance.choice((0, 20)))
            case 4:
                return write_offset(topic, chance.choice(GROUPS), partition, place, opaque)
            case _:
                return write_line("transaction", chance.choice(XIDS), "null", chance.choice(STEPS), opaque)


class RemotingSpeaker(Speaker):
    """A connection of the remoting protocol; what the broker asks of it, it answers."""

    def __init__(self, broker: BrokerProcess) -> None:
        super().__init__(broker)
        self._reader = FrameReader()

    def say(self, chance: Chance, count: int) -> bytes:
        said = []
        for _ in range(count):
            number, (code, fields, body) = self._next(), self._command(chance)
            said.append(encode_request(code, number, fields, body))
            self.missing[number] = code, fields
        return b"".join(said)

    def _take(self, data: bytes) -> None:
        for frame in self._reader.receive(data):
            if frame.is_response:
                del self.missing[frame.opaque]
            elif not frame.is_oneway:
                self.socket.sendall(encode_response(frame, 0, {}))

    def _command(self, chance: Chance) -> Said:
        kinds: tuple[Callable[[Chance, str, str], Said], ...]
        kinds = (self._send, self._send, self._read, self._read, self._group, self._change, self._change, self._decide)
        return chance.choice(kinds)(chance, chance.choice(TOPICS), chance.choice(GROUPS))

    def _send(self, chance: Chance, topic: str, group: str) -> Said:
        body = bytes(chance.choice((1, 100, 9000)))
        kind = chance.randrange(4)
        own = {0: "DELAY\x011\x02", 1: f"TRAN_MSG\x01true\x02PGROUP\x01{group}\x02UNIQ_KEY\x01k\x02"}.get(
            kind, "KEYS\x01k\x02TAGS\x01t\x02"
        )
        header = send_header(topic, own, partition=chance.randrange(2), sys_flag=TRANSACTION_PREPARED if kind == 1 else 0)
        if kind == 2:
            own = f"MSG_TYPE\x01reply\x02CORRELATION_ID\x01c\x02REPLY_TO_CLIENT\x01{chance.choice(CLIENTS)}\x02"
            header = send_header("DefaultCluster_REPLY_TOPIC", own)
            return Request.SEND_REPLY_MESSAGE, encode_header(header), body
        return Request.SEND_MESSAGE, encode_header(header), body

    def _read(self, chance: Chance, topic: str, group: str) -> Said:
        offset, partition = chance.choice((0, 1, 5, 50, 500)), chance.randrange(2)
        place = fields_of(topic=topic, queueId=partition)
        match chance.randrange(8):
            case 0 | 1 | 2:
                flags = PULL_HAS_SUBSCRIPTION | (PULL_SUSPENDS if chance.random() < 0.5 else 0)
                wanted = fields_of(consumerGroup=group, queueOffset=offset, commitOffset=0, subVersion=0, maxMsgNums=32)
                wanted |= fields_of(sysFlag=flags, suspendTimeoutMillis=20, expressionType="TAG")
                return Request.PULL_MESSAGE, place | wanted | {"subscription": chance.choice(("*", "t"))}, b""
            case 3:
                timestamp = chance.choice((0, 1 << 50))
                return Request.SEARCH_OFFSET_BY_TIMESTAMP, place | fields_of(timestamp=timestamp, boundaryType="LOWER"), b""
            case 4:
                code = chance.choice((Request.GET_MAX_OFFSET, Request.GET_MIN_OFFSET, Request.GET_EARLIEST_MSG_STORETIME))
                return code, place, b""
            case 5:
                times = fields_of(key="k", maxNum=32, beginTimestamp=0, endTimestamp=1 << 50)
                return Request.QUERY_MESSAGE, place | times, b""
            case 6:
                return Request.BULK_FETCH, place | fields_of(queueOffset=offset, maxMsgNums=100, maxBytes=50_000), b""
            case _:
                return Request.GET_TOPIC_STATS_INFO, place, b""

    def _group(self, chance: Chance, topic: str, group: str) -> Said:
        client, queues = chance.choice(CLIENTS), [{"topic": topic, "brokerName": "metaq", "queueId": chance.randrange(2)}]
        subscriptions = [{"topic": topic, "subString": "*", "subVersion": chance.randrange(9), "expressionType": "TAG"}]
        consumer = {"groupName": group, "subscriptionDataSet": subscriptions, "messageModel": "CLUSTERING"}
        match chance.randrange(6):
            case 0 | 1:
                beat = {"clientID": client, "producerDataSet": [{"groupName": group}], "consumerDataSet": [consumer]}
                return Request.HEART_BEAT, {}, json.dumps(beat).encode()
            case 2:
                return Request.UNREGISTER_CLIENT, fields_of(clientID=client, producerGroup=group, consumerGroup=group), b""
            case 3:
                code = chance.choice((Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ))
                wanted = {"clientId": client, "consumerGroup": group, "mqSet": queues}
                return code, {}, json.dumps(wanted).encode()
            case 4:
                place = fields_of(consumerGroup=group, topic=topic, queueId=0)
                return Request.UPDATE_CONSUMER_OFFSET, place | fields_of(commitOffset=chance.randrange(50)), b""
            case _:
                return Request.GET_CONSUMER_LIST_BY_GROUP, fields_of(consumerGroup=group), b""

    def _change(self, chance: Chance, topic: str, group: str) -> Said:
        match chance.randrange(7):
            case 0 | 1:
                return Request.DELETE_TOPIC_IN_BROKER, fields_of(topic=topic), b""
            case 2:
                made = fields_of(
                    topic=topic, defaultTopic="TBW102", readQueueNums=2, writeQueueNums=2, perm=chance.choice((6, 2))
                )
                return Request.UPDATE_AND_CREATE_TOPIC, made | fields_of(order=False, topicFilterType="SINGLE_TAG"), b""
            case 3 | 4:
                return Request.DELETE_EXPIRED_COMMITLOG, {}, b""
            case 5:
                return Request.DELETE_SUBSCRIPTIONGROUP, fields_of(groupName=group, removeOffset=True), b""
            case _:
                reset = fields_of(topic=topic, group=group, timestamp=0, isForce=True)
                return Request.INVOKE_BROKER_TO_RESET_OFFSET, reset, b""

    def _decide(self, chance: Chance, topic: str, group: str) -> Said:
        place = chance.randrange(200_000)
        if chance.random() < 0.3:
            back = fields_of(offset=place, group=group, delayLevel=chance.choice((-1, 0, 1)), originTopic=topic)
            return Request.CONSUMER_SEND_MSG_BACK, back, b""
        ends = fields_of(producerGroup=group, tranStateTableOffset=chance.randrange(20), commitLogOffset=place)
        ends |= fields_of(commitOrRollback=chance.choice((8, 12)), fromTransactionCheck=False, msgId="k")
        return Request.END_TRANSACTION, ends, b""


class Speaking(BrokerProcess):
    """A broker whose reads find nothing in memory while there is a file ``cold``."""

    program = ("tests.support.controlled",)


def run_turn(broker: BrokerProcess, speakers: list[Speaker], chance: Chance, cold: Path) -> tuple[int, int]:
    """How many commands were answered, and how many connections broken."""
    cold.unlink(missing_ok=True)
    if chance.random() < 0.5:
        cold.touch()
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        for speaker in chance.sample(speakers, len(speakers)):
            speaker.socket.sendall(speaker.say(chance, chance.randrange(1, COMMANDS)))
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    broken = [speaker for speaker in speakers if chance.random() < BREAKING]
    for speaker in broken:
        speaker.socket.close()
        speakers.remove(speaker)
    answered = sum(len(speaker.missing) for speaker in speakers)
    deadline = time.monotonic() + SOCKET_TIMEOUT_S
    while any(speaker.missing for speaker in speakers):
        ready, _, _ = select.select([speaker.socket for speaker in speakers], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise Violation(f"no answer within {SOCKET_TIMEOUT_S} s to {[speaker.missing for speaker in speakers]}")
        for speaker in speakers:
            if speaker.socket in ready:
                speaker.take()
    return answered, len(broken)


def run_case(seed: int) -> dict[str, int]:
    """Some turns of one broker."""
    chance, done = Chance(seed), Counter[str]()
    kinds: tuple[type[Speaker], ...] = (TextSpeaker, RemotingSpeaker, RemotingSpeaker)
    with tempfile.TemporaryDirectory() as folder, Speaking(Path(folder) / "data", *FLAGS) as broker:
        speakers: list[Speaker] = []
        for turn in range(TURNS):
            speakers += [chance.choice(kinds)(broker) for _ in range(SPEAKERS - len(speakers))]
            try:
                answered, broken = run_turn(broker, speakers, chance, Path(folder) / "cold")
            except (OSError, Violation) as error:
                raise Violation(f"seed {seed}, turn {turn}: {error!r}\n{broker.stderr()[-4000:]}") from error
            done.update(commands=answered, turns=1, broken=broken)
        for speaker in speakers:
            speaker.socket.close()
        code = broker.terminate()
        log = broker.stderr()
        if code or "Traceback" in log:
            raise Violation(f"seed {seed}: exit code {code}; {log[max(0, log.find('Traceback') - 300) :][:4000]}")
        done["deleted"] = log.count("segments deleted")
    return dict(done)


def run(seed: int, count: int) -> Result:
    """So many commands, by brokers of ``TURNS`` turns."""
    return run_until(run_case, "commands", seed, count, "turns")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    print(run(options.seed, options.count))
