"""An application behind the HTTP port: made when it is asked for first, and bounded in its work.

Metrics and health never come here, so they are answered whatever the application does.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from gevent.lock import BoundedSemaphore

from metaq.engine.pool import run_in_pool
from metaq.errors import Overloaded
from metaq.server.http.away import CONNECTION_S
from metaq.server.http.environ import DEADLINE, Environ, StartResponse

RETRY_MS: Final = 1000
PIECE_BYTES: Final = 64 * 1024
"""Bytes of a body that are counted, and then read, at once."""
_ADMITTED: Final = "metaq.admitted"
"""The name in a request's environment of a function that is called with the size of a piece of its body before it is read."""
DOCUMENT: Final = "metaq.document"
"""The name in a request's environment that is there when its answer is a file for everybody: it has the time that metrics have,
and who does not read it keeps no other request out."""
FRAMES: Final = "metaq.frames"
"""The name in a request's environment of what follows the answer by which its connection became one of WebSocket."""
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class SiteBounds(NamedTuple):
    """The bounds of an application's work."""

    calls: int
    """Requests at once, streams of events included."""
    bodies_bytes: int
    """Bytes of the bodies of all requests at once."""
    answer_s: float
    """The longest that a request may take, its wait for messages included, until its answer is read."""


class BoundedSite:
    """An application, as the HTTP port has it."""

    def __init__(
        self, make: Callable[[], Application], bounds: SiteBounds, busy: Callable[[str, str], tuple[str, bytes]]
    ) -> None:
        """Prepare. ``make`` imports and makes the application, in a thread.

        ``busy`` returns type and content of the answer to a request that cannot be taken, from its method and the reason.
        """
        self._make = make
        self._bounds = bounds
        self._busy = busy
        self._application: Application | None = None
        self._making = BoundedSemaphore(1)
        self._calls = 0
        self.stopped = False
        """True when the store is about to be closed: no more requests are taken."""
        self.bodies_bytes = 0
        """Bytes of the bodies that requests have now."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        """Yield the answer. The request counts until its last byte is written, or its client is gone; not one of a document."""
        if self.stopped or self._calls >= self._bounds.calls:
            why = "the broker stops" if self.stopped else f"{self._bounds.calls} requests are in progress"
            kind, content = self._busy(environ["REQUEST_METHOD"], f"{why}; retry after {RETRY_MS} ms")
            headers = [("Content-Type", kind), ("Content-Length", str(len(content))), ("Retry-After", str(RETRY_MS // 1000))]
            start_response("503 Service Unavailable", headers)
            yield content
            return
        environ[DEADLINE].within(self._bounds.answer_s)
        body, counts = _Body(self), 1
        self._calls += counts
        try:
            request = {**environ, _ADMITTED: body.admit}
            answer = (self._application or self._made())(request, start_response)
            if DOCUMENT in request:
                environ[DEADLINE].within(CONNECTION_S)
                counts = 0
                self._calls -= 1
            yield from answer
            yield from request.pop(FRAMES, ())
        finally:
            self._calls -= counts
            self.bodies_bytes -= body.size

    def admit(self, size: int) -> None:
        """Count bytes of a body that are about to be read. Raise ``Overloaded`` when all together are too large."""
        if self.bodies_bytes + size > self._bounds.bodies_bytes:
            raise Overloaded(f"bodies of {self.bodies_bytes} bytes are being read already", retry_after_ms=RETRY_MS)
        self.bodies_bytes += size

    def _made(self) -> Application:
        with self._making:
            if self._application is None:
                self._application = run_in_pool(self._make)
            return self._application


class _Body:
    """The body of one request, as it counts among all."""

    def __init__(self, site: BoundedSite) -> None:
        self._site = site
        self.size = 0

    def admit(self, size: int) -> None:
        self._site.admit(size)
        self.size += size


def read_body(environ: Environ, read: Callable[[int], bytes], size: int) -> bytes:
    """Return the body of a request that a site has: so many bytes, of which ``read`` returns the next ones.

    They count as they come, so that those who send none keep nobody out. Raise ``Overloaded`` when the bodies of all requests
    together are too large.
    """
    pieces: list[bytes] = []
    for at in range(0, size, PIECE_BYTES):
        piece = min(PIECE_BYTES, size - at)
        environ[_ADMITTED](piece)
        pieces.append(read(piece))
    return b"".join(pieces)
