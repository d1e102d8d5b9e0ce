"""The base of all producers: a member of a producer group, which brokers know."""

import threading
from types import TracebackType
from typing import Self

from metaq.client import checks
from metaq.client.connecting.core import Core
from metaq.client.connecting.forks import renewed_in_children


class GroupProducer:
    """The base class of producers: a member of a producer group, registered at brokers until closed. A context manager."""

    def __init__(self, core: Core, group: str) -> None:
        checks.group(group)
        self.group = group
        self._core = core
        self._closed = False
        self._renew()
        core.add_producer(group)
        renewed_in_children(self)

    def _renew(self) -> None:
        """Make a new lock in a child of a fork, where the producer continues over the child's own connections."""
        self._closing = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unregister the producer at the brokers; the client stays open."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        if not self._core.closed:
            self._core.remove_producer(self.group)
