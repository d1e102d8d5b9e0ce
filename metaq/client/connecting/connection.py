"""One connection: the streams of its two directions, and the reason why it is lost."""

import contextlib
import socket
from typing import Final

from metaq.address import parse_address
from metaq.client.connecting.access import Access
from metaq.errors import ConnectionFailed

STALL_S: Final = 10.0
"""The longest time that a write may take; after that the connection is given up."""


class LinkConnection:
    """A connection to an address. One thread may read it while another one writes."""

    def __init__(self, address: str, timeout_s: float, access: Access) -> None:
        """Connect; ``NotConnected`` when that does not succeed within ``timeout_s``."""
        self.address = address
        self.lost = ""
        """The reason why it is lost; empty while it is not known to be."""
        self.outgoing = access.connect(parse_address(address), timeout_s)
        # A time limit belongs to the socket object, so each direction has an object of its own.
        self.incoming = self.outgoing.dup()
        self.incoming.settimeout(0.0)  # whoever reads has waited for data before
        self.outgoing.settimeout(STALL_S)

    def give_up(self, reason: str) -> None:
        """Write nothing more, and wake the thread that reads. The first reason is kept."""
        self.lost = self.lost or reason
        with contextlib.suppress(OSError):  # the other side may have closed it
            self.incoming.shutdown(socket.SHUT_RDWR)

    def failure(self) -> ConnectionFailed:
        """Return the error of what was in flight when the connection was lost."""
        return ConnectionFailed(f"the connection to {self.address} is lost: {self.lost}")

    def abandon(self) -> None:
        """Close the descriptors in a child of a fork, without shutting down the connection, which is the parent's."""
        for handle in (self.incoming, self.outgoing):
            with contextlib.suppress(OSError):
                handle.close()
