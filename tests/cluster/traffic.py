"""Messages of every kind, over both protocols, and what readers see of them."""

from typing import Final, NamedTuple

from metaq.client.text.textclient import TextClient
from metaq.errors import Refused as TextRefused
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import encode_header, with_letters
from metaq.protocol.remoting.sending.batch import BatchItem, encode_batch
from tests.support.admin import connect
from tests.support.broker import BrokerProcess
from tests.support.halves import COMMIT, ROLLBACK, Producer
from tests.support.messages import records, send, send_header, sent
from tests.support.remoting import RemotingClient
from tests.support.talk import Talk

TOPIC: Final = "orders"
LATER: Final = "later"
NEVER_ASKED: Final = ("--check-after-ms", "3600000")


class Read(NamedTuple):
    """One message, as readers of both protocols see it."""

    ordinal: int
    log_offset: int
    id: int
    body: bytes


def put_all_kinds(broker: BrokerProcess, round_: str) -> None:
    """Single messages, batches, delayed ones, transactions and half messages; some are left undecided."""
    with TextClient(broker.host, broker.port) as text:
        text.put(TOPIC, f"single {round_}".encode(), partition=0)
        text.put_many(TOPIC, [b"many %d" % number * (number % 40) for number in range(300)], partition=0)
    with Talk(broker) as talk:
        for decision in ("COMMIT_ONE_PHASE", "ROLLBACK", "COMMIT_TWO_PHASE"):
            key = f"XID:3:{decision.encode().hex()}{round_.encode().hex()}:01:m"
            talk.done(key, "BEGIN")
            for number in range(3):
                talk.placed(TOPIC, b"%s %d" % (decision.encode(), number), key)
            talk.done(key, *(["PREPARE"] if decision == "COMMIT_TWO_PHASE" else []), decision)
    with connect(broker) as client:
        send_batch(client, [b"of a batch"] * 5)
        sent(client, send(client, send_header(LATER, "DELAY\x011\x02"), f"delayed {round_}".encode()))
        sent(client, send(client, send_header(LATER, "DELAY\x0118\x02"), f"parked {round_}".encode()))
    with Producer(broker) as producer:
        for body, outcome in ((b"committed", COMMIT), (b"rolled back", ROLLBACK), (b"undecided", None)):
            begun = producer.half(body + round_.encode())
            if outcome is not None:
                assert producer.end(begun.end(outcome)) == Response.SUCCESS


def send_batch(client: RemotingClient, bodies: list[bytes]) -> None:
    """One batch, which must succeed."""
    fields = with_letters(encode_header(send_header(TOPIC)._replace(batch=True)))
    answer = client.call(Request.SEND_BATCH_MESSAGE, fields, encode_batch(BatchItem(0, body, "") for body in bodies))
    assert answer.code == Response.SUCCESS, answer.remark


def try_send(client: RemotingClient, body: bytes, topic: str = TOPIC) -> RemotingCommand:
    """The answer to one message over the remoting protocol, whatever it is."""
    return client.response(send(client, send_header(topic), body))


def try_put(broker: BrokerProcess, body: bytes, topic: str = TOPIC) -> tuple[int, str]:
    """Code and text of the answer to one message over the text protocol."""
    with TextClient(broker.host, broker.port) as client:
        try:
            client.put(topic, body, partition=0)
        except TextRefused as error:
            return error.code, error.text
        return 200, ""


def read_all(broker: BrokerProcess, topic: str = TOPIC) -> list[Read]:
    """All that readers see; over both protocols, which must agree."""
    with connect(broker) as client:
        found = records(client, topic)
    with TextClient(broker.host, broker.port) as text:
        messages = list(text.iterate(topic))
    assert [message.body for message in messages] == [bytes(record.body) for record in found]
    return [
        Read(record.queue_offset, record.log_offset, message.id, bytes(record.body))
        for record, message in zip(found, messages, strict=True)
    ]
