"""The blocking client library: plain sockets and threads, no event loop. It also works in programs patched by gevent.

Names with an underscore in front are the library's own, whichever of its modules uses them; all others are for programs.
"""

from metaq.client.admin.admin import Admin
from metaq.client.client import Client, connect
from metaq.client.consuming.beginning import ConsumeFrom
from metaq.client.consuming.consumer import SimpleConsumer
from metaq.client.consuming.pull import PullConsumer
from metaq.client.consuming.push import PushConsumer
from metaq.client.consuming.sharing import Model
from metaq.client.intercepting import Interceptor, intercept
from metaq.client.leasing.consumer import LeaseConsumer, LeasedMessage
from metaq.client.message import OutgoingMessage, ReceivedMessage, SendResult, SendStatus
from metaq.client.retries import Backoff, Retry
from metaq.client.sending.producer import Producer
from metaq.client.serializers import JSON, Serializer
from metaq.client.text.textclient import Batch, PutManyFailed, TextClient, parse_stats
from metaq.client.transactions.transactions import HalfMessage, Outcome, TransactionProducer, TransactionResult
from metaq.client.transactions.xaerrors import OutcomeUnknown, XaFailed
from metaq.client.xa import XaSession

__all__ = [
    "JSON",
    "Admin",
    "Backoff",
    "Batch",
    "Client",
    "ConsumeFrom",
    "HalfMessage",
    "Interceptor",
    "LeaseConsumer",
    "LeasedMessage",
    "Model",
    "Outcome",
    "OutcomeUnknown",
    "OutgoingMessage",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "PutManyFailed",
    "ReceivedMessage",
    "Retry",
    "SendResult",
    "SendStatus",
    "Serializer",
    "SimpleConsumer",
    "TextClient",
    "TransactionProducer",
    "TransactionResult",
    "XaFailed",
    "XaSession",
    "connect",
    "intercept",
    "parse_stats",
]
