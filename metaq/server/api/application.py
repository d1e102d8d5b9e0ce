"""The WSGI application of the API: finds the operation of a request, checks who asks and what, and writes the answer.

Falcon, msgspec and the client's decoders take 12 MB and some tenths of a second to import, so this module is imported in a
thread when the first request comes (``metaq.server.api.site``).
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

import falcon
import msgspec
from falcon import App, Request, Response

from metaq.engine.pool import run_in_pool
from metaq.errors import BadRequest, MetaqError, RequestFailed
from metaq.protocol.remoting.codes import Response as Code
from metaq.server.access.permissions import Action, Principal, denied
from metaq.server.api.events import events
from metaq.server.api.openapi import EVENTS, document
from metaq.server.api.operations import OPERATIONS, ROOT, Form, Operation
from metaq.server.api.origin import check_origin
from metaq.server.api.page import page_of_document
from metaq.server.api.problems import ProblemDetails, problem_headers, problem_of, problem_with
from metaq.server.api.publishing import ROW_HEADERS, PublishForms, Publishing
from metaq.server.http.bounded import DOCUMENT, FRAMES, Application, read_body
from metaq.server.http.environ import DEADLINE, SHORT_WAY, address_of, principal_of
from metaq.server.services.call import Call, Interior
from metaq.server.services.rows import read_input
from metaq.server.services.sending import MessageInput, publish, published

logger = logging.getLogger(__name__)

_JSON: Final = "application/json"
_ANYTHING: Final = (Action.INSPECT, Action.PUBLISH, Action.SUBSCRIBE, Action.CONSUME)
_LONGEST_QUERY: Final = 8192


def make_application(interior: Interior, is_stopped: Callable[[], bool]) -> Application:
    """Return the application; ``metaq.server.api.site`` bounds its work, and stops it."""
    app: App[Request, Response] = App(media_type=_JSON)
    app.req_options.strip_url_path_trailing_slash = True
    app.set_error_serializer(_serialize)
    app.add_error_handler(Exception, _unexpected)
    app.add_error_handler(MetaqError, _refused)
    forms = PublishForms(_reader(MessageInput), _published_row, partial(_publish_refused, interior))
    publishing = Publishing(interior.context, interior.endpoint, interior.turns, interior.sends, forms, is_stopped)
    by_path: dict[str, _Resource] = {}
    for operation in OPERATIONS:
        resource = by_path.setdefault(operation.path, _Resource())
        responder = _Responder(operation, interior, publishing if operation.service is publish else None)
        resource.add(operation.method, responder)
    for path, resource in by_path.items():
        app.add_route(f"{ROOT}{path}", resource)
    described = document()
    app.add_route("/api/openapi.json", _Fixed(_JSON, msgspec.json.encode(described)))
    app.add_route("/api/docs", _Fixed("text/html; charset=utf-8", page_of_document(described)))
    app.add_route("/api", _Moved("/api/docs"))
    return cast(Application, app)


class _Resource:
    """The operations of one path, by method, in the form that Falcon looks for."""

    def add(self, method: str, responder: Callable[..., None]) -> None:
        setattr(self, f"on_{method.lower()}", responder)


class _Fixed:
    """A document that never changes, and is open to everybody."""

    def __init__(self, content_type: str, data: bytes) -> None:
        self._content_type = content_type
        self._data = data

    def on_get(self, request: Request, response: Response) -> None:
        request.env[DOCUMENT] = True
        response.content_type = self._content_type
        response.set_header("Content-Security-Policy", "default-src 'none'; style-src 'self' 'unsafe-inline'")
        response.data = self._data


class _Moved:
    def __init__(self, where: str) -> None:
        self._where = where

    def on_get(self, _: Request, response: Response) -> None:
        raise falcon.HTTPSeeOther(self._where)


class _Responder:
    """Does one operation."""

    def __init__(self, operation: Operation, interior: Interior, publishing: Publishing | None) -> None:
        self._operation = operation
        self._publishing = publishing
        self._takes = operation.takes
        self._read = None if self._takes.body is None else _reader(self._takes.body)
        self._encoder = msgspec.json.Encoder()
        self._interior = interior

    def __call__(self, request: Request, response: Response, **path: str) -> None:
        authentication = self._interior.endpoint.authentication
        request.context.is_known = True  # as long as the reason is not who asks
        check_origin(request.env, self._interior)
        request.context.is_known = not authentication.has_users
        version = authentication.version
        principal = principal_of(authentication, request.env)
        request.context.is_known |= principal.named
        request.context.by = principal.name
        if not any(map(principal.may_somewhere, _ANYTHING)):  # then neither its body nor anything else of it is read
            raise denied(principal, Action.INSPECT)
        talk = run_in_pool(_websocket) if self._takes.form is Form.FRAMES else None
        if talk is not None:
            talk.switch(request, response)
        address = address_of(request.env), int(request.env.get("REMOTE_PORT") or 0)
        call = Call(self._interior, principal, address)
        try:
            inputs = self._inputs(request, path)
            waits = getattr(inputs.get("body"), "wait_ms", 0)  # for messages, which a client that is gone must not get
            with request.env[DEADLINE].or_departure() if waits else nullcontext():
                result = self._operation.service(call, **inputs)
        except BaseException:
            call.end()
            raise
        if talk is not None:
            request.env[FRAMES] = talk.Frames(call, result, request.env["wsgi.input"], request.env[DEADLINE])
            return
        if self._takes.form is Form.EVENTS:
            response.content_type = EVENTS
            response.set_header("Cache-Control", "no-store")
            response.stream = events(call, result, request.env[DEADLINE])
            return
        call.end()
        response.set_headers(ROW_HEADERS)
        response.data = self._encoder.encode(result)
        if self._publishing is not None and SHORT_WAY in request.env and not self._publishing.is_stopped():
            request.env[SHORT_WAY](self._publishing.short_way(principal, version, inputs["topic"]))
        if self._operation.is_change and getattr(result, "applied", True):  # a preview changes nothing
            self._note(request)

    def _note(self, request: Request) -> None:
        name, path = self._operation.id, request.path[:200]
        address = address_of(request.env)
        logger.info("api change user=%s address=%s operation=%s path=%r", request.context.by, address, name, path)

    def _inputs(self, request: Request, path: Mapping[str, str]) -> dict[str, Any]:
        """Return what a request says, by the names of the service's parameters. Raise ``BadRequest``."""
        found = {name: read_input(value, self._takes.path[name], f"{name} in the path") for name, value in path.items()}
        query = _query(request)
        if self._takes.query is not None:
            found["query"] = read_input(query, self._takes.query, "the query")
        elif query:
            raise BadRequest(f"this operation takes no query, and {min(query)[:40]!r} is in it")
        if self._read is not None:
            found["body"] = self._read(self._body(request))
        return found

    def _body(self, request: Request) -> bytes:
        kind = (request.content_type or "").partition(";")[0].strip().lower()
        if kind != _JSON:  # a page of another site cannot send this type without being asked whether it may
            raise falcon.HTTPUnsupportedMediaType(description=f"the body must be {_JSON}, as the header Content-Type says")
        size = request.content_length
        if size is None:
            raise falcon.HTTPLengthRequired(description="the body needs a Content-Length")
        most = 2 * self._interior.context.settings.max_message_bytes + 64 * 1024
        if size > most:
            raise falcon.HTTPContentTooLarge(description=f"a body of {size} bytes is over the limit of {most}")
        return read_body(request.env, request.bounded_stream.read, size)


def _reader(kind: Any) -> Callable[[bytes], Any]:
    """Return what reads a body of a type, and raises ``BadRequest``."""
    decoder = msgspec.json.Decoder(kind)

    def read(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # a ValidationError is a DecodeError
            raise BadRequest(f"the body: {error}") from error

    return read


def _websocket() -> Any:
    """Return the module for WebSocket, of which only who subscribes needs the library."""
    from metaq.server.api import websocket  # noqa: PLC0415

    return websocket


def _query(request: Request) -> dict[str, str]:
    if len(request.query_string) > _LONGEST_QUERY:
        raise BadRequest(f"a query of {len(request.query_string)} characters is over the limit of {_LONGEST_QUERY}")
    found: dict[str, str] = {}
    for name, value in falcon.uri.parse_query_string(request.query_string, keep_blank=True, csv=False).items():
        if not isinstance(value, str):
            raise BadRequest(f"{name[:40]!r} is in the query {len(value)} times")
        found[name] = value
    return found


# -- publishes that have a short way ----------------------------------------------------------------------------------


def _published_row(*given: Any) -> bytes:
    return msgspec.json.encode(published(*given))


def _publish_refused(
    interior: Interior, error: MetaqError, outcome: str, principal: Principal
) -> tuple[str, Mapping[str, str], bytes]:
    is_known = principal.named or not interior.endpoint.authentication.has_users
    found = problem_of(RequestFailed(error.code, f"the message {outcome}: {error}"), is_known=is_known)
    return f"{found.status} {found.title}", problem_headers(found), msgspec.json.encode(found)


# -- errors -----------------------------------------------------------------------------------------------------------


def _refused(request: Request, response: Response, error: MetaqError, _: Mapping[str, str]) -> None:
    _write(response, problem_of(error, is_known=getattr(request.context, "is_known", False)), error)


def _unexpected(request: Request, response: Response, error: Exception, _: Mapping[str, str]) -> None:
    if isinstance(error, AssertionError):
        raise error  # the broker's own state is wrong: the process ends
    if isinstance(error, (falcon.HTTPError, falcon.HTTPStatus, OSError)):
        raise error
    logger.exception("api request failed method=%s path=%r", request.method, request.path[:200])
    _write(response, problem_with(HTTPStatus.INTERNAL_SERVER_ERROR, "the request met an error of the broker, see its log"))


def _serialize(_: Request, response: Response, error: falcon.HTTPError) -> None:
    """Write an error that Falcon found: no such path, no such method, a header that cannot be read."""
    status = falcon.code_to_http_status(error.status)
    number = int(str(status).partition(" ")[0])
    code = Code.REQUEST_CODE_NOT_SUPPORTED if number in (404, 405) else Code.SYSTEM_ERROR
    _write(response, problem_with(number, error.description or _without_words(number), code))


def _without_words(status: int) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return "there is no such path; /api/docs lists them"
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return "this path has other methods; the header Allow and /api/docs list them"
    return HTTPStatus(status).phrase


def _write(response: Response, found: ProblemDetails, error: MetaqError | None = None) -> None:
    response.status = f"{found.status} {found.title}"
    response.data = msgspec.json.encode(found)
    response.set_headers(problem_headers(found, getattr(error, "retry_after_ms", None)))
