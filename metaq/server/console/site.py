"""The console as the HTTP port has it: the bounds of its work, and the answer to those that it cannot take."""

from functools import partial
from typing import Final

from metaq.server.http.bounded import Application, BoundedSite, SiteBounds
from metaq.server.services.call import ANSWER_S, Interior

BOUNDS: Final = SiteBounds(calls=64, bodies_bytes=64 * 1024 * 1024, answer_s=ANSWER_S + 30.0)


def console_site(interior: Interior) -> BoundedSite:
    """Return the console of the broker with these parts."""
    return BoundedSite(partial(_made_of, interior), BOUNDS, _busy)


def _busy(method: str, reason: str) -> tuple[str, bytes]:
    """Return a page that loads itself again, as a replica whose role changes answers soon; a change is not made again."""
    is_look = method == "GET"
    again = '<meta http-equiv="refresh" content="1">' if is_look else ""
    said = reason if is_look else f"Nothing was changed: {reason}"
    head = f'<head><meta charset="utf-8">{again}<title>metaq</title></head>'
    return "text/html; charset=utf-8", f'<!doctype html><html lang="en">{head}<body><p>{said}</p></body></html>'.encode()


def _made_of(interior: Interior) -> Application:
    """Return the application; as with the API, only who opens a page pays for what it imports."""
    from metaq.server.console.application import make_console  # noqa: PLC0415

    return make_console(interior)
