"""The visitors of pages: from which site a request comes, and which login its cookie has."""

import logging
from typing import Final, NamedTuple
from urllib.parse import quote

import falcon
from falcon import Request, Response

from metaq.errors import AccessDenied
from metaq.server.access.permissions import Principal
from metaq.server.api.origin import check_host, check_origin
from metaq.server.console.visit import ROOT, link
from metaq.server.http.environ import address_of
from metaq.server.services.call import Interior

logger = logging.getLogger(__name__)

COOKIE: Final = "metaq_login_{port}"
"""Browsers send the cookies of a host to all its ports, where other brokers may be."""
TOKEN_FIELD: Final = "change_token"  # noqa: S105 - a name
"""The field of a form that proves that a page of this console has it."""
_POLL: Final = "HTTP_METAQ_POLL"
"""Set by what a page loads by itself, which keeps no login alive."""
_LONGEST_NEXT: Final = 2048
_ARRIVAL: Final = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="0"><title>metaq</title>'
    "</head><body></body></html>"
)
"""Asks for the same page again: from a link of another site a browser comes without the cookie, and now it sends it."""


class Visitor(NamedTuple):
    """The user of a browser."""

    principal: Principal
    token: str
    """That of the login; empty without users."""


def check_site(request: Request, interior: Interior) -> None:
    """Raise ``AccessDenied`` for what another site has a browser send. A link from there to a page may be followed."""
    if request.method == "GET" and request.env.get("HTTP_SEC_FETCH_MODE") == "navigate":
        check_host(request.env.get("HTTP_HOST") or "", interior)
    else:
        check_origin(request.env, interior)


def visitor_of(request: Request, interior: Interior) -> Visitor | None:
    """Return who has opened a page, or ``None`` when that must be proven first."""
    authentication = interior.endpoint.authentication
    if not authentication.has_users:
        return Visitor(authentication.anonymous, "")
    token = request.cookies.get(_cookie(request), "")
    principal = authentication.logged_in(token, used=_POLL not in request.env) if token else None
    return None if principal is None else Visitor(principal, token)


def check_login(visitor: Visitor, interior: Interior) -> None:
    """Raise ``AccessDenied`` when the login of a visitor has ended since; to look keeps none alive."""
    authentication = interior.endpoint.authentication
    if authentication.has_users and authentication.logged_in(visitor.token, used=False) is None:
        raise AccessDenied("the login has ended; log in again")


def check_change(visitor: Visitor, given: str, interior: Interior) -> None:
    """Raise ``AccessDenied`` for a change without the token of this visitor's pages."""
    if not interior.endpoint.authentication.logins.is_change_token(visitor.token, given):
        raise AccessDenied("this form is of another login, or of before a restart of the broker; load its page again")


def to_login(request: Request) -> falcon.HTTPStatus:
    """Return the answer that leads a browser to the login, and from there back to a page."""
    if request.method == "GET" and request.env.get("HTTP_SEC_FETCH_SITE") == "cross-site":
        return falcon.HTTPStatus(200, headers={"Content-Type": "text/html; charset=utf-8"}, text=_ARRIVAL)
    where = link("login", next=address_in(request) if request.method == "GET" else None)
    if request.get_header("HX-Request"):  # else the login would be shown inside of a page
        return falcon.HTTPStatus(401, headers={"HX-Redirect": link("login")})
    return falcon.HTTPStatus(303, headers={"Location": where})


def address_in(request: Request) -> str:
    """Return the address that was asked for, as a link to it."""
    return quote(request.path) + (f"?{request.query_string}" if request.query_string else "")


def begin_login(request: Request, response: Response, interior: Interior, name: str, password: str) -> None:
    """Begin a login, and give the browser its cookie. Raise ``AccessDenied`` or ``Overloaded``."""
    token = interior.endpoint.authentication.log_in(name, password, address_of(request.env))
    _set_cookie(request, response, token)
    logger.info("console login user=%s address=%s", name, address_of(request.env))


def end_login(request: Request, response: Response, interior: Interior, visitor: Visitor) -> None:
    """End a login."""
    interior.endpoint.authentication.logins.end(visitor.token)
    _set_cookie(request, response, "")


def after_login(wanted: str) -> str:
    """Return the page to which a login leads: the wanted one if it is of this console, else the first."""
    is_own = wanted.startswith(f"{ROOT}/") and wanted.isascii() and wanted.isprintable() and len(wanted) <= _LONGEST_NEXT
    return wanted if is_own and "\\" not in wanted else f"{ROOT}/"


def _cookie(request: Request) -> str:
    return COOKIE.format(port=request.env["SERVER_PORT"])


def _set_cookie(request: Request, response: Response, token: str) -> None:
    response.set_cookie(
        _cookie(request),
        token,
        max_age=None if token else 0,
        path=ROOT,
        secure=request.scheme == "https",
        http_only=True,
        same_site="Strict",
    )
