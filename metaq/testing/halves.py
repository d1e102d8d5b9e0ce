"""Half messages in memory (specs: remoting protocol, section 5.5)."""

from typing import NamedTuple

from metaq.client.connecting.transport import ClientAnswer
from metaq.client.message import ReceivedMessage
from metaq.errors import UnknownTopic
from metaq.message import HALF_TOPIC
from metaq.protocol import properties as names
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.headers import CheckTransaction, EndTransaction
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_ROLLBACK, TRANSACTION_TYPE
from metaq.testing.log import Letter, Log, LogPlace, decode


class Half(NamedTuple):
    """An undecided message, and the request that asks its producers about it."""

    group: str
    question: CheckTransaction
    record: bytes


class _Staged(NamedTuple):
    letter: Letter
    log_offset: int


class Halves:
    """The undecided messages of an in-memory broker. Not thread-safe."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._undecided: dict[int, _Staged] = {}
        """The messages by their offset in the half topic."""

    def put(self, letter: Letter) -> LogPlace:
        """Keep a message until its transaction is decided."""
        letter = letter._replace(sys_flag=letter.sys_flag & ~TRANSACTION_TYPE)
        real = {names.REAL_TOPIC: letter.topic, names.REAL_QUEUE: str(letter.partition)}
        placed = self._log.put(letter._replace(topic=HALF_TOPIC, partition=0, properties=letter.properties | real))
        self._undecided[placed.queue_offset] = _Staged(letter, decode_offset_id(placed.offset_id).log_offset)
        return placed

    def end(self, header: EndTransaction) -> ClientAnswer:
        """Commit or roll back a half message, as its producer asks; ``UnknownTopic`` when its topic was deleted."""
        number, outcome = header.tran_state_table_offset, header.commit_or_rollback
        staged = self._undecided.get(number)
        if staged is None or staged.log_offset != header.commit_log_offset:
            return ClientAnswer(
                Response.SYSTEM_ERROR, remark=f"no undecided half message {number} at {header.commit_log_offset}"
            )
        group = staged.letter.properties.get(names.PRODUCER_GROUP)
        if group != header.producer_group:
            return ClientAnswer(
                Response.SYSTEM_ERROR, remark=f"half message {number} is of group {group}, not {header.producer_group}"
            )
        if outcome == TRANSACTION_COMMIT:
            letter = self._log.unparked(staged.letter)
            if letter is None:
                raise UnknownTopic(f"the topic {staged.letter.topic} was deleted: create it again")
            kept = {name: value for name, value in letter.properties.items() if name != names.TRANSACTION}
            self._log.put(letter._replace(properties=kept, sys_flag=letter.sys_flag | TRANSACTION_COMMIT))
        if outcome in {TRANSACTION_COMMIT, TRANSACTION_ROLLBACK}:
            del self._undecided[number]
        return ClientAnswer()

    def undecided(self) -> list[Half]:
        """Return the undecided half messages with the requests about them, the oldest first."""
        return [
            Half(
                staged.letter.properties.get(names.PRODUCER_GROUP, ""),
                CheckTransaction(number, staged.log_offset, staged.letter.properties.get(names.UNIQUE_KEY)),
                self._log.encode(staged.letter, number, staged.log_offset),
            )
            for number, staged in self._undecided.items()
        ]

    def messages(self) -> list[ReceivedMessage]:
        """Return the undecided messages, the oldest first."""
        return [decode(half.record) for half in self.undecided()]
