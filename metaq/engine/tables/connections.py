"""The interface of a client's connection that the broker needs, whatever transport carries it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from metaq.protocol.remoting.frames import RemotingCommand

Answered = Callable[[RemotingCommand | None], None]
"""A callback that is called once with a client's answer, or with ``None`` when there will be none."""


class ConnectionUser(Protocol):
    """The user of a connection."""

    @property
    def name(self) -> str: ...


class Connection(Protocol):
    """One client's connection. It is also the client's identity: two connections are never equal."""

    address: Any
    """The peer's address; its first two items are host and port."""

    def __hash__(self) -> int: ...

    @property
    def principal(self) -> ConnectionUser: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None:
        """Close the connection now."""
        ...

    def at_close(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once when the connection closes."""
        ...

    def tell(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> bool:
        """Send a one-way request; return false when the client is gone, or does not read what it is sent."""
        ...

    def ask(self, code: int, fields: Mapping[str, str], body: bytes, answered: Answered) -> None:
        """Send a request; ``answered`` is called when the client answers, closes, or takes too long."""
        ...
