"""Clients of a group with transactions that outlive its masters: XA branches, and half messages."""

import random
from dataclasses import dataclass
from typing import Final, Literal

import orjson

from metaq.message import TopicPartition
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import CheckTransaction, EndTransaction, Int32, decode_header, encode_header, with_letters
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from metaq.protocol.text.replies import OK, Reply
from metaq.protocol.text.writing import write_line, write_put
from tests.cluster.history import PARTITIONS
from tests.cluster.load import Load, RemotingWorker, TextWorker, in_doubt
from tests.crash.command import Violation
from tests.support.messages import send_header

NOT_STARTED: Final = "has not been started"
SESSION: Final = "S1"
MOST_PREPARED: Final = 3
PRODUCER_GROUP: Final = "pg"
HALF_TOPIC: Final = TopicPartition("half", 0)
CHECKS: Final = ("--check-after-ms", "1500", "--check-interval-ms", "1500", "--max-checks", "1000")
"""Flags of brokers that ask soon, and never give up."""

Decision = Literal["COMMIT_TWO_PHASE", "ROLLBACK"]


@dataclass(slots=True)
class Branch:
    """One that was prepared, or may have been."""

    key: str
    numbers: list[int]
    decision: Decision = "ROLLBACK"
    """Who does not know whether a branch is prepared cannot commit it: it may be open, and stay so."""
    prepared: bool = False
    """The broker has said so."""
    told: bool = False
    """The decision was sent; whether it arrived is not known."""


class Brancher(TextWorker):
    """XA branches: some are committed at once, some by whichever replica is master later."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(load, rng)
        self._undecided: list[Branch] = []
        self._keys = 0

    def settled(self) -> bool:
        return not self._undecided

    def step(self) -> bool:
        begins = self.load.transactions.is_set()
        if self._undecided and (len(self._undecided) >= MOST_PREPARED or not begins or self.rng.random() < 0.3):
            return self._decide(self._undecided[0])
        return not begins or self._prepare()

    def _ask(self, frame: bytes) -> Reply:
        assert self.link is not None
        reply = next(self.link.ask(frame))
        self.said = f"{reply.code} {reply.body.decode()}"
        return reply

    def _step(self, key: str, kind: str) -> Reply:
        return self._ask(write_line("transaction", key, SESSION, kind, 1))

    def _prepare(self) -> bool:
        """A new branch with messages."""
        assert self.link is not None
        self._keys += 1
        key = f"XID:1:{self.history.new_stream():08x}:{self._keys:04x}:m"
        numbers: list[int] = []
        prepared = False
        try:
            if self._step(key, "BEGIN").code != OK:
                return False
            for _ in range(self.rng.choice((1, 2, 5))):
                partition = self.rng.choice(PARTITIONS)
                number, body = self.history.send(partition)
                numbers.append(number)
                if self._ask(write_put(*partition, 0, body, number, transaction=key)).code != OK:
                    return False
            prepared = True
            return self._prepared(Branch(key, numbers))
        finally:
            if not prepared:  # nobody else could prepare it
                for number in numbers:
                    self.history.refused(number)

    def _prepared(self, branch: Branch) -> bool:
        assert self.link is not None
        self._undecided.append(branch)
        reply = next(self.link.ask(*(self._line(branch.key, kind) for kind in ("END", "PREPARE")), replies=1))
        if reply.code != OK:
            return False
        branch.prepared = True
        branch.decision = self.rng.choice(("COMMIT_TWO_PHASE", "COMMIT_TWO_PHASE", "ROLLBACK"))
        return self.rng.random() >= 0.6 or self._decide(branch)

    def _line(self, key: str, kind: str) -> bytes:
        return write_line("transaction", key, SESSION, kind, 1)

    def _decide(self, branch: Branch) -> bool:
        """Commit or roll back, now or once more."""
        told_before, branch.told = branch.told, True
        reply = self._step(branch.key, branch.decision)
        text = reply.body.decode()
        if reply.code != OK and NOT_STARTED not in text:
            branch.told = told_before or in_doubt(text)
            return False
        if reply.code != OK and not told_before:
            if branch.prepared:
                raise Violation(f"lost: a branch that was prepared: {branch} {reply} by replica {self.number}")
            decided = self.history.refused  # it never was
        else:
            decided = self.history.stored if branch.decision == "COMMIT_TWO_PHASE" else self.history.refused
        for number in branch.numbers:
            decided(number)
        self._undecided.remove(branch)
        self.history.counts["branches decided"] += 1
        return True


class HalfSender(RemotingWorker):
    """Half messages: the decision is sent and answered, sent and not waited for, or left to be asked for."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(load, rng)
        self.decisions: dict[int, bool] = {}
        """Number → whether it is to be committed, of all that the broker has taken for certain."""

    def connect(self) -> None:
        super().connect()
        assert self.client is not None
        beat = {"clientID": "10.0.0.9@1", "producerDataSet": [{"groupName": PRODUCER_GROUP}], "consumerDataSet": []}
        self.client.call(Request.HEART_BEAT, body=orjson.dumps(beat))

    def settled(self) -> bool:
        return all(self.history.seen(number) for number, commits in self.decisions.items() if commits)

    @staticmethod
    def commits(number: int) -> bool:
        """Return whether the half message of this number is committed: all but every fourth are."""
        return number % 4 != 0

    def step(self) -> bool:
        assert self.client is not None
        self._answer_checks()
        if not self.load.transactions.is_set():
            return self._look()
        number, body = self.history.send(HALF_TOPIC)
        if not self.commits(number):
            self.history.refused(number)
        own = f"TRAN_MSG\x01true\x02PGROUP\x01{PRODUCER_GROUP}\x02UNIQ_KEY\x01K{number}\x02"
        header = send_header(HALF_TOPIC.topic, own, partition=HALF_TOPIC.partition, sys_flag=TRANSACTION_PREPARED)
        answer = self.client.call(Request.SEND_MESSAGE_V2, with_letters(encode_header(header)), body)
        if answer.code != Response.SUCCESS:
            return False
        self.decisions[number] = self.commits(number)
        offset_id = answer.fields["msgId"]
        end = self._end(number, int(answer.fields["queueOffset"]), decode_offset_id(offset_id).log_offset)
        way = self.rng.random()
        if way < 0.3:
            return True  # the broker will ask
        opaque = self.client.send(Request.END_TRANSACTION, encode_header(end), oneway=way < 0.6)
        return way < 0.6 or self.client.response(opaque).code == Response.SUCCESS

    def _end(self, number: int, ordinal: int, log_offset: int, *, asked: bool = False) -> EndTransaction:
        decision = TRANSACTION_COMMIT if self.commits(number) else TRANSACTION_ROLLBACK
        return EndTransaction(PRODUCER_GROUP, ordinal, log_offset, Int32(decision), f"K{number}", asked)

    def _look(self) -> bool:
        """Have what the master asks come in."""
        assert self.client is not None
        answer = self.client.call(Request.REPLICA_STATUS)
        return answer.code == Response.SUCCESS and bool(orjson.loads(answer.body)["role"] == "master")

    def _answer_checks(self) -> None:
        assert self.client is not None
        requests, self.client.requests = self.client.requests, []
        for request in requests:
            if request.code == Request.CHECK_TRANSACTION_STATE:
                header = decode_header(CheckTransaction, request.fields)
                number = int((header.msg_id or "K0")[1:])
                end = self._end(number, header.tran_state_table_offset, header.commit_log_offset, asked=True)
                self.client.send(Request.END_TRANSACTION, encode_header(end), oneway=True)
                self.history.counts["decisions asked for"] += 1
