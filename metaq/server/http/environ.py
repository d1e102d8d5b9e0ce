"""A request to the HTTP port, as WSGI represents it, and its sender."""

import base64
from collections.abc import Callable, Mapping
from typing import Any, Final

from metaq.errors import AccessDenied
from metaq.server.access.authentication import Authentication
from metaq.server.access.permissions import Principal
from metaq.server.wire.listeners import IPV4_IN_IPV6

Environ = Mapping[str, Any]
StartResponse = Callable[..., Any]
DEADLINE: Final = "metaq.deadline"
"""The name in a request's environment under which its ``Deadline`` is (``metaq.server.http.httpserver``)."""
SHORT_WAY: Final = "metaq.short_way"
"""The name in a request's environment of a function that has a ``Take`` answer requests with the same head from now on
(``metaq.server.http.session``). It is there when the head is a usual one."""


def address_of(environ: Environ) -> str:
    """Return the host that a request comes from, as other ports write it."""
    return str(environ["REMOTE_ADDR"]).removeprefix(IPV4_IN_IPV6)


def principal_of(authentication: Authentication, environ: Environ) -> Principal:
    """Return the principal that sends a request. Raise ``AccessDenied`` or ``Overloaded``."""
    kind, _, proof = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    address = address_of(environ)
    if kind.lower() == "bearer":
        return authentication.holder(proof.strip(), address)
    if kind.lower() == "basic":
        try:
            name, _, password = base64.b64decode(proof, validate=True).decode().partition(":")
        except ValueError as error:
            raise AccessDenied(f"Authorization: Basic needs name and password in Base64: {error}") from error
        return authentication.check(name, password, address)
    return authentication.anonymous
