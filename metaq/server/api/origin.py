"""The refusal of requests that a page of another site has a browser send."""

import ipaddress
from functools import lru_cache

from metaq.address import parse_address
from metaq.errors import AccessDenied, ConfigError
from metaq.server.http.environ import Environ
from metaq.server.services.call import Interior


def check_origin(environ: Environ, interior: Interior) -> None:
    """Raise ``AccessDenied`` for a request that a page of another site has a browser send.

    Without users, whoever reaches this port may do everything; so then a browser must also have been told a number, or
    ``localhost``, or a name of this broker: any other name may lead here by the DNS of a stranger.
    """
    host = environ.get("HTTP_HOST") or ""
    origin = environ.get("HTTP_ORIGIN")
    if environ.get("HTTP_SEC_FETCH_SITE") == "cross-site" or (origin is not None and origin.partition("://")[2] != host):
        raise AccessDenied("a page of another site may not call this broker")
    check_host(host, interior)


def check_host(host: str, interior: Interior) -> None:
    """Raise ``AccessDenied`` when there are no users, and a browser was told a name that is not known to be this broker's."""
    if not interior.endpoint.authentication.has_users and not _is_own(host, interior):
        raise AccessDenied(f"without users, this broker answers to a number or to localhost, and not to {host[:100]!r}")


def _is_own(host: str, interior: Interior) -> bool:
    name, _, port = host.lower().rpartition(":")
    name = name if name and port.isdecimal() else host.lower()
    return name in ("", "localhost", interior.context.host.lower()) or _is_number(name) or _is_set(name, interior)


@lru_cache(maxsize=64)
def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_set(name: str, interior: Interior) -> bool:
    """Return whether a setting says that this broker is reached under a name."""
    settings = interior.context.settings
    given = {"http_listen": settings.http_listen, "advertise": settings.advertise}
    return any(_host_of(setting, value) == name for setting, value in given.items())


def _host_of(setting: str, value: str) -> str | None:
    try:
        return parse_address(value, setting=setting).host.lower()
    except ConfigError:
        return None
