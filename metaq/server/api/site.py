"""The API as the HTTP port has it: an application that is made when it is asked for first, and the bounds of its work.

Metrics and health never come here, so they are answered whatever the API does.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

import orjson
from gevent.lock import BoundedSemaphore

from metaq.engine.pool import run_in_pool
from metaq.errors import Overloaded
from metaq.server.http.http import DEADLINE, Environ, StartResponse
from metaq.server.services.call import ANSWER_S, Interior

MOST_CALLS: Final = 128
"""Requests at once, streams of events included."""
MOST_BODIES_BYTES: Final = 64 * 1024 * 1024
"""Bytes of the bodies of all requests at once."""
RETRY_MS: Final = 1000
ANSWER_MOST_S: Final = ANSWER_S + 30.0
"""The longest that a request may take, its wait for messages included, until its answer is read."""
ADMITTED: Final = "metaq.admitted"
"""The name in a request's environment of a function that is called with the size of a body before it is read."""
FRAMES: Final = "metaq.frames"
"""The name in a request's environment of what follows the answer by which its connection became one of WebSocket."""
Application = Callable[[Environ, StartResponse], Iterable[bytes]]


class ApiSite:
    """The API of one broker, a WSGI application."""

    def __init__(self, interior: Interior) -> None:
        """Prepare the API of the broker with these parts."""
        self._interior = interior
        self._application: Application | None = None
        self._making = BoundedSemaphore(1)
        self._calls = 0
        self.stopped = False
        """True when the store is about to be closed: no more requests are taken."""
        self.bodies_bytes = 0
        """Bytes of the bodies that requests have now."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterator[bytes]:
        """Yield the answer; the request counts until its last byte is written, or its client is gone."""
        if self.stopped or self._calls >= MOST_CALLS:
            why = "the broker stops" if self.stopped else f"{MOST_CALLS} requests are in progress"
            yield _busy(start_response, f"{why}; retry after {RETRY_MS} ms")
            return
        environ[DEADLINE].within(ANSWER_MOST_S)
        body = _Body(self)
        self._calls += 1
        try:
            request = {**environ, ADMITTED: body.admit}
            yield from (self._application or self._made())(request, start_response)
            yield from request.pop(FRAMES, ())
        finally:
            self._calls -= 1
            self.bodies_bytes -= body.size

    def _made(self) -> Application:
        with self._making:
            if self._application is None:
                self._application = run_in_pool(partial(_made_of, self._interior))
            return self._application


class _Body:
    """The body of one request, as it counts among all."""

    def __init__(self, site: ApiSite) -> None:
        self._site = site
        self.size = 0

    def admit(self, size: int) -> None:
        """Count a body that is about to be read. Raise ``Overloaded`` when all together are too large."""
        if self._site.bodies_bytes + size > MOST_BODIES_BYTES:
            raise Overloaded(f"bodies of {self._site.bodies_bytes} bytes are being read already", retry_after_ms=RETRY_MS)
        self._site.bodies_bytes += size
        self.size = size


def _busy(start_response: StartResponse, reason: str) -> bytes:
    content = {"title": "Service Unavailable", "status": 503, "detail": reason, "code": 2, "retriable": True}
    body = orjson.dumps({**content, "type": "about:blank"})
    length = ("Content-Length", str(len(body)))
    start_response("503 Service Unavailable", [("Content-Type", "application/problem+json"), length, ("Retry-After", "1")])
    return body


def _made_of(interior: Interior) -> Application:
    """Return the application. It takes 12 MB and some tenths of a second to import: only who uses it pays for it."""
    from metaq.server.api.application import make_application  # noqa: PLC0415

    return make_application(interior)
