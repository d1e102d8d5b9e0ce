"""The API as the HTTP port has it: the bounds of its work, and the answer to those that it cannot take."""

from collections.abc import Callable
from typing import Final

import orjson

from metaq.server.http.bounded import Application, BoundedSite, SiteBounds
from metaq.server.services.call import ANSWER_S, Interior

BOUNDS: Final = SiteBounds(calls=128, bodies_bytes=64 * 1024 * 1024, answer_s=ANSWER_S + 30.0)


def api_site(interior: Interior) -> BoundedSite:
    """Return the API of the broker with these parts."""
    site = BoundedSite(lambda: _made_of(interior, lambda: site.stopped), BOUNDS, _busy)
    return site


def _busy(_: str, reason: str) -> tuple[str, bytes]:
    content = {"title": "Service Unavailable", "status": 503, "detail": reason, "code": 2, "retriable": True}
    return "application/problem+json", orjson.dumps({**content, "type": "about:blank"})


def _made_of(interior: Interior, is_stopped: Callable[[], bool]) -> Application:
    """Return the application. It takes 12 MB and some tenths of a second to import: only who uses it pays for it."""
    from metaq.server.api.application import make_application  # noqa: PLC0415

    return make_application(interior, is_stopped)
