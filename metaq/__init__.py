"""A message broker in one process, and its clients.

::

    import metaq

    with metaq.connect("127.0.0.1:9876") as client:
        client.producer().send("orders", b"paid 2003")
        with client.consumer("orders", "billing") as consumer:
            for message in consumer:
                print(message.body)
                consumer.commit()

``metaq.aio`` has the same names for asyncio, ``metaq.testing`` has an in-memory broker for tests, and ``TextClient`` speaks the
line protocol that a person can type.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metaq import aio, errors, testing
    from metaq.client import (
        JSON,
        Admin,
        Backoff,
        Batch,
        Client,
        ConsumeFrom,
        HalfMessage,
        Interceptor,
        LeaseConsumer,
        LeasedMessage,
        Model,
        Outcome,
        OutcomeUnknown,
        OutgoingMessage,
        Producer,
        PullConsumer,
        PushConsumer,
        PutManyFailed,
        ReceivedMessage,
        Retry,
        SendResult,
        SendStatus,
        Serializer,
        SimpleConsumer,
        TextClient,
        TransactionProducer,
        TransactionResult,
        XaFailed,
        XaSession,
        connect,
        intercept,
    )
    from metaq.errors import (
        BadRequest,
        BrokerBusy,
        ChecksumMismatch,
        ClientClosed,
        ClientError,
        ConfigError,
        ConnectionFailed,
        DataLost,
        DecodeError,
        LeaseLost,
        MetaqError,
        NotConnected,
        OffsetOutOfRange,
        ProtocolError,
        Refused,
        RequestTimeout,
        RouteNotFound,
        RouteProblem,
        SendContext,
        SendFailed,
        StreamLost,
        SubscriptionInvalid,
        TooLate,
        UnknownHandle,
    )
    from metaq.message import Message, MessageQueue, PutResult

__version__ = "0.1.0"

__all__ = [
    "JSON",
    "Admin",
    "Backoff",
    "BadRequest",
    "Batch",
    "BrokerBusy",
    "ChecksumMismatch",
    "Client",
    "ClientClosed",
    "ClientError",
    "ConfigError",
    "ConnectionFailed",
    "ConsumeFrom",
    "DataLost",
    "DecodeError",
    "HalfMessage",
    "Interceptor",
    "LeaseConsumer",
    "LeaseLost",
    "LeasedMessage",
    "Message",
    "MessageQueue",
    "MetaqError",
    "Model",
    "NotConnected",
    "OffsetOutOfRange",
    "Outcome",
    "OutcomeUnknown",
    "OutgoingMessage",
    "Producer",
    "ProtocolError",
    "PullConsumer",
    "PushConsumer",
    "PutManyFailed",
    "PutResult",
    "ReceivedMessage",
    "Refused",
    "RequestTimeout",
    "Retry",
    "RouteNotFound",
    "RouteProblem",
    "SendContext",
    "SendFailed",
    "SendResult",
    "SendStatus",
    "Serializer",
    "SimpleConsumer",
    "StreamLost",
    "SubscriptionInvalid",
    "TextClient",
    "TooLate",
    "TransactionProducer",
    "TransactionResult",
    "UnknownHandle",
    "XaFailed",
    "XaSession",
    "aio",
    "connect",
    "errors",
    "intercept",
    "testing",
]


_MODULES = ("metaq.client", "metaq.message", "metaq.errors")
"""The modules that have the public names, in this order: the client's OutcomeUnknown wins."""
_PARTS = ("aio", "errors", "testing")
"""The modules that programs use themselves."""


def __getattr__(name: str) -> object:
    """Import a public name on first use, because the broker, which lives in this package too, does not need the client."""
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        for module in map(importlib.import_module, _MODULES):
            if hasattr(module, name):
                found: object = getattr(module, name)
                globals()[name] = found  # later uses do not come here
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    """Return what a person may use: the public names, whether they are imported yet or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
