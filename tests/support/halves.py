"""A producer of transactional messages, for tests."""

import json
from pathlib import Path
from typing import Final, NamedTuple

from metaq.protocol.ids import decode_offset_id
from metaq.protocol.record import Record, decode_record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import CheckTransaction, EndTransaction, Int32, decode_header, encode_header
from metaq.protocol.sysflag import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from tests.support.broker import BrokerProcess
from tests.support.messages import records, send, send_header, sent
from tests.support.remoting import RemotingClient

GROUP: Final = "pg"
TOPIC: Final = "orders"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
GIVEN_UP: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
COMMIT: Final = TRANSACTION_COMMIT
ROLLBACK: Final = TRANSACTION_ROLLBACK
UNKNOWN: Final = 0
NEVER: Final = ("--check-after-ms", "3600000")
"""Flags of a broker that asks no producer."""
SNAPSHOT: Final = Path("config") / "halves.json"


def bodies(client: RemotingClient, topic: str = TOPIC, partition: int = 0) -> list[bytes]:
    """Return the bodies of all messages of a partition."""
    return [bytes(record.body) for record in records(client, topic, partition)]


class Begun(NamedTuple):
    """A half message that was sent, as its producer knows it."""

    ordinal: int
    log_offset: int
    key: str
    offset_id: str
    group: str = GROUP

    def end(self, decision: int) -> EndTransaction:
        """Return the request with which the producer decides the message."""
        return EndTransaction(self.group, self.ordinal, self.log_offset, Int32(decision), self.key)


class Checked(NamedTuple):
    """A broker's check: the question to a producer, with the half message."""

    header: CheckTransaction
    record: Record

    def end(self, decision: int) -> EndTransaction:
        """Return the request with which a Java client answers the check."""
        header = self.header
        where = (header.tran_state_table_offset, header.commit_log_offset)
        return EndTransaction(GROUP, *where, Int32(decision), header.msg_id or "", True, header.transaction_id)


class Producer(RemotingClient):
    """One client of the producer group."""

    def __init__(self, broker: BrokerProcess, client_id: str = "10.0.0.9@1", *, beats: bool = True) -> None:
        super().__init__(broker.host, broker.port)
        self._client_id = client_id
        if beats:
            self.beat()

    def beat(self) -> None:
        """Say that it is there."""
        beat = {"clientID": self._client_id, "producerDataSet": [{"groupName": GROUP}], "consumerDataSet": []}
        assert self.call(Request.HEART_BEAT, body=json.dumps(beat).encode()).code == Response.SUCCESS

    def start_half(self, body: bytes, *, key: str = "", pairs: str = "", partition: int = 0, flag: int = 0) -> int:
        """Send a half message without waiting; the opaque of the answer."""
        own = f"TRAN_MSG\x01true\x02PGROUP\x01{GROUP}\x02UNIQ_KEY\x01{key or body.hex()}\x02{pairs}"
        return send(self, send_header(TOPIC, own, partition=partition, flag=flag, sys_flag=TRANSACTION_PREPARED), body)

    def half(self, body: bytes, *, key: str = "", pairs: str = "", partition: int = 0, flag: int = 0) -> Begun:
        """Send a half message."""
        fields = sent(self, self.start_half(body, key=key, pairs=pairs, partition=partition, flag=flag))
        assert fields["queueId"] == str(partition)
        assert fields["transactionId"] == (key or body.hex())
        return self.begun(fields)

    def begun(self, fields: dict[str, str]) -> Begun:
        """Return the half message that was sent, by the fields of the answer."""
        offset_id = fields["msgId"]
        return Begun(int(fields["queueOffset"]), decode_offset_id(offset_id).log_offset, fields["transactionId"], offset_id)

    def end(self, end: EndTransaction) -> int:
        """Decide, and return the code of the answer, which real producers do not ask for."""
        return self.call(Request.END_TRANSACTION, encode_header(end)).code

    def start_end(self, end: EndTransaction, *, oneway: bool = False) -> int:
        """Decide without waiting."""
        return self.send(Request.END_TRANSACTION, encode_header(end), oneway=oneway)

    def checked(self) -> Checked:
        """Wait until the broker asks."""
        request = self.request(Request.CHECK_TRANSACTION_STATE)
        assert request.is_oneway
        return Checked(decode_header(CheckTransaction, request.fields), decode_record(request.body))
