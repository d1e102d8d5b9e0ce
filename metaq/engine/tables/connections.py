"""What the broker needs of a client's connection, whatever carries it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from metaq.protocol.remoting.frames import RemotingCommand

Answered = Callable[[RemotingCommand | None], None]
"""Is called once with a client's answer, or with ``None`` when there will be none."""


class User(Protocol):
    """Who is connected."""

    @property
    def name(self) -> str: ...


class Connection(Protocol):
    """One client's connection. It is the client's identity, too: two are never equal."""

    address: Any
    """Host and port first."""
    closing: list[Callable[[], None]]
    """Called once when the connection closes."""

    def __hash__(self) -> int: ...

    @property
    def principal(self) -> User: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None:
        """Close it now."""
        ...

    def tell(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> bool:
        """Send a one-way request, unless the client does not read what it is sent: then false."""
        ...

    def ask(self, code: int, fields: Mapping[str, str], body: bytes, answered: Answered) -> None:
        """Send a request; ``answered`` is called when the client answers, closes, or takes too long."""
        ...
