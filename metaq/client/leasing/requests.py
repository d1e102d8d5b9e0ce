"""PURE: the requests about leased messages, and what their answers mean."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from metaq.client.connecting.transport import Outcome, RemotingRequest, refusal
from metaq.client.consuming.records import decode_messages
from metaq.client.leasing.lease import Lease
from metaq.client.message import ReceivedMessage
from metaq.errors import ClientError, LeaseLost
from metaq.message import TopicPartition
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header
from metaq.protocol.remoting.leases.acks import BatchAck, acks_of, encode_batch_ack
from metaq.protocol.remoting.leases.pop import (
    ALL_QUEUES,
    FROM_END,
    FROM_FIRST,
    AckMessage,
    ChangeInvisibleTime,
    PopAnswer,
    PopMessage,
    receipts_of,
)
from metaq.protocol.remoting.leases.receipts import Receipt
from metaq.protocol.subscription import Subscription

EMPTY: Final = frozenset({Response.POLLING_TIMEOUT, Response.PULL_NOT_FOUND})
"""The answers to a pop when there is no message."""
_MEANS_NOTHING: Final = frozenset({Response.NO_MESSAGE, Response.MESSAGE_ILLEGAL})


class LeaseTerms(NamedTuple):
    """The messages that a consumer leases, and the time for which it does."""

    topic: str
    group: str
    subscription: Subscription
    invisible_ms: int
    from_first: bool

    def pop(self, broker_name: str, most: int, wait_ms: int) -> RemotingRequest:
        """Return the request for at most so many messages of a broker, which may hold it for ``wait_ms``."""
        header = PopMessage(
            self.group,
            self.topic,
            Int32(ALL_QUEUES),
            Int32(most),
            self.invisible_ms,
            wait_ms,
            Int32(FROM_FIRST if self.from_first else FROM_END),
            exp_type=self.subscription.kind.value,
            exp=self.subscription.expression,
            bname=broker_name,
        )
        return RemotingRequest.of(Request.POP_MESSAGE, header)

    def acks(self, broker_name: str, leases: Sequence[Lease]) -> RemotingRequest:
        """Return the request that acks messages of a broker: for one of them that whose answer says what became of it."""
        if len(leases) > 1:
            rows = acks_of(self.group, self.topic, [lease.receipt for lease in leases])
            return RemotingRequest(Request.BATCH_ACK_MESSAGE, body=encode_batch_ack(BatchAck(broker_name, tuple(rows))))
        (lease,) = leases
        receipt = lease.receipt
        topic = lease.message.queue.topic
        header = AckMessage(self.group, topic, Int32(receipt.queue), str(receipt), receipt.offset, broker_name)
        return RemotingRequest.of(Request.ACK_MESSAGE, header)

    def change(self, lease: Lease, invisible_ms: int) -> RemotingRequest:
        """Return the request that lets a lease end ``invisible_ms`` from now."""
        receipt, queue = lease.receipt, lease.message.queue
        header = ChangeInvisibleTime(
            self.group, queue.topic, Int32(receipt.queue), str(receipt), receipt.offset, invisible_ms, queue.broker_name
        )
        return RemotingRequest.of(Request.CHANGE_MESSAGE_INVISIBLETIME, header)


def read_popped(response: RemotingCommand, broker_name: str, topic: str, most: int) -> list[tuple[ReceivedMessage, Receipt]]:
    """Return the messages of an answer with their receipts. Bodies may be inflated to ``most`` bytes.

    ``ProtocolError`` when it cannot be read: its messages come again when their leases end.
    """
    messages = decode_messages(response.body, broker_name, topic, most=most, damaged_too=True)
    places = [(TopicPartition(message.queue.topic, message.partition), message.queue_offset) for message in messages]
    answer = decode_header(PopAnswer, response.fields)
    return list(zip(messages, receipts_of(answer, broker_name, places), strict=True))


def failure_of(outcome: Outcome) -> ClientError | None:
    """Return the error that the answer to an ack or a change means; ``None`` when it succeeded."""
    if isinstance(outcome, ClientError):
        return outcome
    if outcome.code == Response.SUCCESS:
        return None
    error = refusal(outcome)
    return LeaseLost(error.code, error.text) if error.code in _MEANS_NOTHING else error


def done_of(response: RemotingCommand) -> int | None:
    """Return how many messages an answer to acks of many says were finished; ``None`` when its broker does not count them."""
    text = response.fields.get("done", "")
    return int(text) if text.isdecimal() else None
