"""A message broker in one process, spoken to over a line protocol that a person can type.

::

    from metaq import TextClient

    with TextClient("127.0.0.1", 8123) as client:
        client.put("orders", b"paid 2003")
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metaq.client import Batch, PutManyFailed, TextClient
    from metaq.errors import ClientError, ConnectionFailed, MetaqError, Refused, RequestTimeout
    from metaq.message import Message, PutResult

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "ClientError",
    "ConnectionFailed",
    "Message",
    "MetaqError",
    "PutManyFailed",
    "PutResult",
    "Refused",
    "RequestTimeout",
    "TextClient",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is used: the broker and its parts, all inside this package, have no use for a client."""
    if name in __all__:
        for module in ("metaq.errors", "metaq.message", "metaq.client"):
            if hasattr(found := importlib.import_module(module), name):
                return getattr(found, name)
    raise AttributeError(f"module 'metaq' has no attribute {name!r}")
