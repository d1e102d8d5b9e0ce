"""The blocking client library: plain sockets and threads, no event loop. It also works in programs patched by gevent.

Names with an underscore in front are the library's own, whichever of its modules uses them; all others are for programs.

A name is imported with its module when it is first used: ``metaq put`` needs the text client alone.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
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

_NAMES: Final = {
    "admin.admin": ("Admin",),
    "client": ("Client", "connect"),
    "consuming.beginning": ("ConsumeFrom",),
    "consuming.consumer": ("SimpleConsumer",),
    "consuming.pull": ("PullConsumer",),
    "consuming.push": ("PushConsumer",),
    "consuming.sharing": ("Model",),
    "intercepting": ("Interceptor", "intercept"),
    "leasing.consumer": ("LeaseConsumer", "LeasedMessage"),
    "message": ("OutgoingMessage", "ReceivedMessage", "SendResult", "SendStatus"),
    "retries": ("Backoff", "Retry"),
    "sending.producer": ("Producer",),
    "serializers": ("JSON", "Serializer"),
    "text.textclient": ("Batch", "PutManyFailed", "TextClient", "parse_stats"),
    "transactions.transactions": ("HalfMessage", "Outcome", "TransactionProducer", "TransactionResult"),
    "transactions.xaerrors": ("OutcomeUnknown", "XaFailed"),
    "xa": ("XaSession",),
}
"""The public names by the module that has them."""
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found  # later uses do not come here
    return found


def __dir__() -> list[str]:
    """Return what a person may use, imported yet or not, and the modules of the package that are."""
    return sorted({*__all__, *globals()})
