"""One connection: the streams of its two directions, and the reason why it is lost."""

import contextlib
import socket
from typing import Final

from metaq.address import parse_address
from metaq.client.connecting.access import Access
from metaq.errors import ConnectionFailed, NotConnected
from metaq.reasons import reason_of

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
        try:
            # A time limit belongs to the socket object, so each direction has an object of its own.
            self.incoming = self.outgoing.dup()
        except OSError as error:
            self.outgoing.close()
            advice = "close files, or raise the limit of open ones (ulimit -n)"
            raise NotConnected(f"no descriptor for a connection to {address}: {reason_of(error)}; {advice}") from error
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
        """Close the descriptors without shutting down the connection, which in a child of a fork is the parent's."""
        for handle in (self.incoming, self.outgoing):
            with contextlib.suppress(OSError):
                handle.close()
