"""Clients of brokers: plain sockets and threads, no event loop; they work in programs that gevent patched, too."""

from metaq.client.admin import Admin
from metaq.client.client import Client, connect
from metaq.client.consumer import SimpleConsumer
from metaq.client.group import ConsumeFrom, Model
from metaq.client.message import OutgoingMessage, ReceivedMessage, SendResult, SendStatus
from metaq.client.producer import Producer
from metaq.client.pull import PullConsumer
from metaq.client.push import PushConsumer
from metaq.client.textclient import Batch, PutManyFailed, TextClient, parse_stats
from metaq.client.transactions import HalfMessage, Outcome, TransactionProducer, TransactionResult
from metaq.client.xa import XaSession
from metaq.client.xaerrors import OutcomeUnknown, XaFailed

__all__ = [
    "Admin",
    "Batch",
    "Client",
    "ConsumeFrom",
    "HalfMessage",
    "Model",
    "Outcome",
    "OutcomeUnknown",
    "OutgoingMessage",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "PutManyFailed",
    "ReceivedMessage",
    "SendResult",
    "SendStatus",
    "SimpleConsumer",
    "TextClient",
    "TransactionProducer",
    "TransactionResult",
    "XaFailed",
    "XaSession",
    "connect",
    "parse_stats",
]
