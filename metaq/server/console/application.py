"""The WSGI application of the console: finds the route of a request, checks who asks, and writes the page.

What it imports takes some MB and some tenths of a second, so that this module is imported in a thread when the first page is
opened (``metaq.server.console.site``).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

import falcon
from falcon import App, Request, Response

import metaq
from metaq.errors import BadRequest, Fenced, MetaqError
from metaq.server.api.problems import problem_of
from metaq.server.console.assets import Assets
from metaq.server.console.rendering import Renderer
from metaq.server.console.routes import ROUTES, SECTIONS
from metaq.server.console.visit import (
    NOTICES,
    ROOT,
    GoTo,
    PageChange,
    PageData,
    PageExport,
    PageFile,
    PageStream,
    PageView,
    Route,
    Visit,
    link,
)
from metaq.server.console.visitors import (
    TOKEN_FIELD,
    Visitor,
    address_in,
    after_login,
    begin_login,
    check_change,
    check_login,
    check_site,
    end_login,
    to_login,
    visitor_of,
)
from metaq.server.http.bounded import DOCUMENT, Application, read_body
from metaq.server.http.environ import DEADLINE, address_of
from metaq.server.services.call import Call, Interior
from metaq.server.services.rows import as_json

logger = logging.getLogger(__name__)

HTML: Final = "text/html; charset=utf-8"
_FORM: Final = "application/x-www-form-urlencoded"
_LONGEST_QUERY: Final = 8192
_LOGIN_BYTES: Final = 16 * 1024
"""Bytes of the form of a login, which everybody may send."""
_LOGIN_S: Final = 5.0
"""The longest that the form of a login may take to come, in seconds."""
_MOST_FIELDS: Final = 1000
"""Fields of a form; a page has about a hundred."""
_STEP_S: Final = 30.0
"""The longest that an event may take to come and to be read."""
REFRESH_S: Final = "2"
"""Seconds after which a page that could not be shown is loaded again."""
_QUIET: Final = b": nothing new\n\n"
SAFE: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers hide the origin of forms, which is checked
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer; files that never change replace the last."""


def make_console(interior: Interior) -> Application:
    """Return the application; ``metaq.server.console.site`` bounds its work."""
    console = _Console(interior)
    app: App[Request, Response] = App(media_type=HTML, middleware=[_Headers()])
    app.req_options.strip_url_path_trailing_slash = True
    app.set_error_serializer(console.write_http_error)
    app.add_error_handler(Exception, console.write_unexpected)
    app.add_error_handler(MetaqError, console.write_error)
    by_path: dict[str, _Resource] = {"/login": _Resource(), "/logout": _Resource()}
    by_path["/login"].add("get", console.show_login)
    by_path["/login"].add("post", console.log_in)
    by_path["/logout"].add("post", console.log_out)
    for route in ROUTES:
        method, respond = console.responder(route)
        by_path.setdefault(route.path, _Resource()).add(method, respond)
    for path, resource in by_path.items():
        app.add_route(f"{ROOT}{path}".rstrip("/"), resource)
    first = _Resource()
    first.add("get", _to_first_page)
    app.add_route("/", first)
    static = _Resource()
    static.add("get", console.send_asset)
    app.add_route(f"{ROOT}/static/{{digest}}/{{name}}", static)
    return cast(Application, app)


class _Headers:
    def process_request(self, _: Request, response: Response) -> None:
        response.set_headers(SAFE)


class _Resource:
    """The responders of one path, by method, in the form that Falcon looks for."""

    def add(self, method: str, responder: Callable[..., None]) -> None:
        setattr(self, f"on_{method}", responder)


def _to_first_page(_: Request, response: Response) -> None:
    raise falcon.HTTPSeeOther(f"{ROOT}/")


class _Console:
    """Answers requests."""

    def __init__(self, interior: Interior) -> None:
        self._interior = interior
        self._assets = Assets()
        self._renderer = Renderer(static=self._assets.address, version=metaq.__version__, token_field=TOKEN_FIELD)

    def responder(self, route: Route) -> tuple[str, Callable[..., None]]:
        """Return the method of a route, and what answers it."""
        if isinstance(route, PageView):
            return "get", partial(self._show, route)
        if isinstance(route, PageChange):
            return "post", partial(self._change, route)
        if isinstance(route, PageStream):
            return "get", partial(self._stream, route)
        if isinstance(route, PageExport):
            return "get", partial(self._export, route)
        if isinstance(route, PageData):
            return "get", partial(self._send_data, route)
        return "get", partial(self._send_file, route)

    # -- pages --------------------------------------------------------------------------------------------------------

    def _show(self, page: PageView, request: Request, response: Response, **path: str) -> None:
        visit = self._visit(request, path)
        try:
            self._write(request, response, page.template, page.show(visit))
        finally:
            visit.call.end()

    def _change(self, change: PageChange, request: Request, response: Response, **path: str) -> None:
        visit = self._visit(request, path)
        try:
            gone = self._act(change, visit, request, response)
        finally:
            visit.call.end()
        if gone is not None:
            where = gone.path
            if gone.notice:
                where += f"{'&' if '?' in where else '?'}done={gone.notice}" + (f"&count={gone.number}" if gone.number else "")
            raise falcon.HTTPStatus(303, headers={"Location": where})

    def _act(self, change: PageChange, visit: Visit, request: Request, response: Response) -> GoTo | None:
        """Make a change and return where the browser goes on; when it fails, write the page of its form and return ``None``."""
        try:
            gone = change.act(visit)
            visit.changed = True
        except MetaqError as error:
            problem = problem_of(error, is_known=True)
            response.status = f"{problem.status} {problem.title}"
            shown = change.form.show(visit)
            self._write(request, response, change.form.template, shown, error=problem.detail, sent=visit.sent)
            return None
        finally:  # a change in part, too, whose request has taken too long
            if visit.changed:
                _note(change, visit, request)
        return gone

    def _stream(self, stream: PageStream, request: Request, response: Response, **path: str) -> None:
        visit = self._visit(request, path)
        try:
            rows = stream.rows(visit)
        except BaseException:
            visit.call.end()
            raise
        response.content_type = "text/event-stream"
        response.stream = self._events(stream, visit, rows, request)

    def _events(
        self, stream: PageStream, visit: Visit, rows: Iterator[Mapping[str, Any] | None], request: Request
    ) -> Iterator[bytes]:
        """Yield values as events, then end the call. An error ends the stream with the event ``problem``.

        When the role changes it ends without one: the browser connects again, and so comes to the broker in its next role.

        Each is written before the next is looked for, so that a slow reader costs one; a reader that takes none for ``_STEP_S``
        is dropped.
        """
        deadline = request.env[DEADLINE]
        try:
            yield b"retry: 2000\n\n"
            deadline.within(_STEP_S)
            for row in rows:
                check_login(request.context.visitor, self._interior)
                yield _QUIET if row is None else _event("message", self._renderer.fill(stream.template, row))
                deadline.within(_STEP_S)
        except Fenced:
            return
        except MetaqError as error:
            yield _event("problem", error.told)
        finally:
            visit.call.end()

    def _send_file(self, file: PageFile, request: Request, response: Response, **path: str) -> None:
        visit = self._visit(request, path)
        try:
            name, data = file.fetch(visit)
        finally:
            visit.call.end()
        response.content_type = "application/octet-stream"
        response.downloadable_as = name
        response.data = data

    def _export(self, export: PageExport, request: Request, response: Response, **path: str) -> None:
        visit = self._visit(request, path)
        try:
            name, parts = export.fetch(visit)
        except BaseException:
            visit.call.end()
            raise
        response.content_type = "application/octet-stream"
        response.downloadable_as = name
        response.stream = self._parts(visit, parts, request)

    def _parts(self, visit: Visit, parts: Iterator[bytes], request: Request) -> Iterator[bytes]:
        """Yield the parts of a file, then end the call; a reader has ``_STEP_S`` for each part.

        When the role changes the file is cut off, so that its reader sees that it is not whole.
        """
        deadline = request.env[DEADLINE]
        try:
            for part in parts:
                deadline.within(_STEP_S)
                yield part
        except Fenced as error:
            raise ConnectionAbortedError(str(error)) from error
        finally:
            visit.call.end()

    def _send_data(self, data: PageData, request: Request, response: Response, **path: str) -> None:
        visit = self._visit(request, path)
        try:
            response.data = as_json(data.fetch(visit))
        finally:
            visit.call.end()
        response.content_type = "application/json"

    def send_asset(self, request: Request, response: Response, digest: str, name: str) -> None:
        """Send a file that pages need; it is open to everybody."""
        asset = self._assets.find(name, digest)
        if asset is None:
            raise falcon.HTTPNotFound(description="there is no such file; reload the page")
        request.env[DOCUMENT] = True
        response.content_type = asset.content_type
        response.set_header("Cache-Control", "public, max-age=31536000, immutable")
        response.data = asset.data

    # -- logins -------------------------------------------------------------------------------------------------------

    def show_login(self, request: Request, response: Response) -> None:
        """Show the form of the login."""
        check_site(request, self._interior)
        wanted = _query(request).get("next", "")
        if visitor_of(request, self._interior) is not None:
            raise falcon.HTTPSeeOther(after_login(wanted))
        self._write(request, response, "login.html", {"wanted": wanted})

    def log_in(self, request: Request, response: Response) -> None:
        """Begin a login, or show its form again with the reason why it is refused."""
        check_site(request, self._interior)
        request.env[DEADLINE].within(_LOGIN_S)
        sent = self._form(request, _LOGIN_BYTES)
        request.env[DEADLINE].within(_STEP_S)
        wanted = sent.get("next", "")
        if not self._interior.endpoint.authentication.has_users:
            raise falcon.HTTPSeeOther(after_login(wanted))
        try:
            begin_login(request, response, self._interior, sent.get("name", ""), sent.get("password", ""))
        except MetaqError as error:
            problem = problem_of(error, is_known=False)
            response.status = f"{problem.status} {problem.title}"
            self._write(request, response, "login.html", {"wanted": wanted}, error=problem.detail, sent=sent)
            return
        response.status = falcon.HTTP_303
        response.set_header("Location", after_login(wanted))

    def log_out(self, request: Request, response: Response) -> None:
        """End a login."""
        visitor = self._visitor(request)
        check_change(visitor, self._form(request, _LOGIN_BYTES).get(TOKEN_FIELD, ""), self._interior)
        end_login(request, response, self._interior, visitor)
        response.status = falcon.HTTP_303
        response.set_header("Location", link("login"))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _visitor(self, request: Request) -> Visitor:
        """Return who asks. Raise ``AccessDenied``, or what leads to the login."""
        check_site(request, self._interior)
        visitor = visitor_of(request, self._interior)
        if visitor is None:
            raise to_login(request)
        request.context.visitor = visitor
        return visitor

    def _visit(self, request: Request, path: Mapping[str, str]) -> Visit:
        visitor, sent = self._visitor(request), dict[str, str]()
        if request.method == "POST":
            # three characters for a byte of a message at most, and the other fields
            sent = self._form(request, 3 * self._interior.context.settings.max_message_bytes + 64 * 1024)
            check_change(visitor, sent.pop(TOKEN_FIELD, ""), self._interior)
        address = address_of(request.env), int(request.env.get("REMOTE_PORT") or 0)
        return Visit(Call(self._interior, visitor.principal, address), path, _query(request), sent)

    def _form(self, request: Request, most: int) -> dict[str, str]:
        """Return the fields of a form of at most so many bytes. Raise ``BadRequest``, or ``falcon.HTTPError``."""
        kind = (request.content_type or "").partition(";")[0].strip().lower()
        if kind != _FORM:
            raise falcon.HTTPUnsupportedMediaType(description=f"a form must be {_FORM}, as the header Content-Type says")
        length = request.content_length
        if length is None:
            raise falcon.HTTPLengthRequired(description="a form needs a Content-Length")
        if length > most:
            raise falcon.HTTPContentTooLarge(description=f"a form of {length} bytes is over the limit of {most}")
        try:
            text = read_body(request.env, request.bounded_stream.read, length).decode("ascii")
        except UnicodeDecodeError as error:
            raise BadRequest(f"the form is not {_FORM}: {error}") from error
        if text.count("&") >= _MOST_FIELDS:  # to part them takes half a microsecond each
            raise BadRequest(f"a form has {_MOST_FIELDS} fields at most, and this one {text.count('&') + 1:,}")
        return _fields(text)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _write(
        self,
        request: Request,
        response: Response,
        template: str,
        values: Mapping[str, Any],
        *,
        error: str = "",
        sent: Mapping[str, str] | None = None,
    ) -> None:
        visitor: Visitor | None = getattr(request.context, "visitor", None)
        settings, authentication = self._interior.context.settings, self._interior.endpoint.authentication
        query = falcon.uri.parse_query_string(request.query_string)
        shared = {
            "broker": settings.broker_name,
            "cluster": settings.cluster_name,
            "role": "master" if self._interior.context.replicas.is_master else "slave",
            "now_ms": self._interior.context.store.clock.now_ms(),
            "user": "" if visitor is None or not authentication.has_users else visitor.principal.name,
            "token": "" if visitor is None else authentication.logins.change_token(visitor.token),
            "sections": {} if visitor is None else SECTIONS,
            "here": request.path.removeprefix(ROOT).strip("/").partition("/")[0],
            "notice": _notice(query),
            "error": error,
            "sent": sent or {},
            "address": address_in(request),
        }
        response.content_type = HTML
        response.text = self._renderer.fill(template, {**shared, **values})

    def _write_problem(self, request: Request, response: Response, status: int, sentence: str) -> None:
        title = HTTPStatus(status).phrase
        response.status = f"{status} {title}"
        # a replica whose role changes, or a busy broker
        if status == HTTPStatus.SERVICE_UNAVAILABLE and request.method == "GET":
            response.set_header("Refresh", REFRESH_S)
        self._write(request, response, "error.html", {"status": status, "title": title}, error=sentence)

    def write_error(self, request: Request, response: Response, error: MetaqError, _: Mapping[str, str]) -> None:
        """Write the page of an error of the broker."""
        problem = problem_of(error, is_known=True)
        self._write_problem(request, response, problem.status, problem.detail)

    def write_unexpected(self, request: Request, response: Response, error: Exception, _: Mapping[str, str]) -> None:
        """Write the page of an error that should not be."""
        if isinstance(error, AssertionError):
            raise error  # the broker's own state is wrong: the process ends
        if isinstance(error, (falcon.HTTPError, falcon.HTTPStatus, OSError)):
            raise error
        logger.exception("console request failed method=%s path=%r", request.method, request.path[:200])
        self._write_problem(request, response, 500, "the request met an error of the broker, see its log")

    def write_http_error(self, request: Request, response: Response, error: falcon.HTTPError) -> None:
        """Write the page of an error that Falcon found."""
        status = int(str(falcon.code_to_http_status(error.status)).partition(" ")[0])
        words = "there is no such page" if status == HTTPStatus.NOT_FOUND else HTTPStatus(status).phrase
        self._write_problem(request, response, status, error.description or words)


def _note(change: PageChange, visit: Visit, request: Request) -> None:
    operation, user, address = change.act.__name__, visit.call.principal.name, address_of(request.env)
    logger.info("console change user=%s address=%s operation=%s path=%r", user, address, operation, request.path[:200])


def _event(name: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"event: {name}\n{lines}\n".encode()


def _query(request: Request) -> dict[str, str]:
    if len(request.query_string) > _LONGEST_QUERY:
        raise BadRequest(f"a query of {len(request.query_string)} characters is over the limit of {_LONGEST_QUERY}")
    return _fields(request.query_string)


def _fields(text: str) -> dict[str, str]:
    """Return fields by name; of several with one name the last, which is how a form says that a box is not checked."""
    found = falcon.uri.parse_query_string(text, keep_blank=True, csv=False)
    return {name: value if isinstance(value, str) else value[-1] for name, value in found.items()}


def _notice(query: Mapping[str, Any]) -> str:
    """Return the sentence about a change that the address speaks of."""
    done, count = query.get("done"), query.get("count", "0")
    if not isinstance(done, str) or not isinstance(count, str) or not (count.isascii() and count.isdecimal()):
        return ""
    return NOTICES.get(done, "").format(count=f"{int(count[:9]):,}")
