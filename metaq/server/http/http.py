"""Metrics and health over HTTP, on a port that answers from before recovery until the process ends.

=============  ==================================================================================================
route          answers
=============  ==================================================================================================
``/healthz``   200 for as long as the event loop runs: ``{"state":"recovering"}``
``/readyz``    200 when this process does what it is there for, else 503 with the reasons
``/metrics``   what is measured, in the text format of Prometheus (``metaq.engine.figures.metrics``)
``/``          and ``/console``, ``/api``, and all below these: what the broker's ``Site`` answers (``metaq.server.sites``)
=============  ==================================================================================================

With users, ``/metrics`` requires a login: ``Authorization: Basic`` with name and password, or ``Bearer`` with the secret of a
user. The health routes are open to all.

Readiness, while a store is recovered and later::

    {"ready":false,"state":"recovering","reasons":["the store is being recovered"],
     "recovery":{"step":"reading the log","done":1073741824,"total":4294967296,"unit":"bytes","seconds":12.4}}
    {"ready":false,"state":"serving","reasons":["no room: …"],"role":"master"}

``metaq.server.http.port`` manages the connections.
"""

import logging
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Final, Protocol

import gevent
import orjson

import metaq
from metaq.address import LOOPBACK, Address, parse_listen
from metaq.config import Settings
from metaq.engine.figures.metrics import CONTENT_TYPE, Family, Histogram, Metric, MetricKind
from metaq.errors import AccessDenied, ConfigError, Overloaded
from metaq.form import FORM
from metaq.replication.peers import Certificate
from metaq.server.access.authentication import Authentication
from metaq.server.access.permissions import Action, demand
from metaq.server.http.environ import Environ, StartResponse, principal_of
from metaq.server.http.port import HttpPort
from metaq.server.http.process import PROCESS, process_families
from metaq.server.http.scrapes import Scrapes
from metaq.server.wire.listeners import Listener, resolve
from metaq.server.wire.pace import Pace
from metaq.store.files.filecache import Rest
from metaq.store.recovery.progress import RecoveryStep

logger = logging.getLogger(__name__)

NONE: Final = "none"
WATCH_S: Final = 0.1
"""Interval at which the lateness of the loop is measured."""
STALL_BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

BUILD: Final = Metric(
    "metaq_build_info",
    MetricKind.GAUGE,
    "1",
    "Versions of metaq and of Python, metaq compiled or not; always 1.",
    ("version", "form", "python"),
)
READY: Final = Metric("metaq_ready", MetricKind.GAUGE, "0 or 1", "Whether /readyz says that this process is ready.")
STALLS: Final = Metric(
    "metaq_loop_stall_seconds",
    MetricKind.HISTOGRAM,
    "seconds",
    "Delay of the event loop in seconds, measured every 0.1 s.",
)
OWN: Final = (BUILD, READY, *PROCESS, STALLS)
"""The metrics that every process exposes from the start."""


class Stage(StrEnum):
    """The stage of a process's life."""

    STARTING = "starting"
    RECOVERING = "recovering"
    SERVING = "serving"
    STOPPING = "stopping"


class Monitored(Protocol):
    """The metrics and readiness of a process that serves."""

    def reasons(self) -> list[str]:
        """Return the reasons why it is not ready; empty when it is."""
        ...

    def facts(self) -> Mapping[str, object]:
        """Return further facts for ``/readyz``, each a word or a number."""
        ...

    def families(self, rest: Rest) -> Iterator[Family]:
        """Yield all metrics with their values. ``rest`` is called between the steps of collecting them."""
        ...

    def stalled(self, seconds: float) -> None:
        """Take note of how late the event loop was, which is measured every ``WATCH_S``."""
        ...


Answer = tuple[str, str, bytes]
"""Status, content type and body."""


class Site(Protocol):
    """The WSGI application that answers at ``/`` and below ``SITES``."""

    def __call__(self, environ: Environ, start_response: StartResponse, /) -> Iterable[bytes]: ...

    @property
    def pace(self) -> Pace:
        """The pace of the loop that its requests keep to."""
        ...


SITES: Final = ("/api", "/console")
UNAUTHORIZED: Final = "401 Unauthorized"
UNAVAILABLE: Final = "503 Service Unavailable"


class Monitor:
    """The HTTP port of one process."""

    def __init__(self, settings: Settings, beside: str) -> None:
        """Bind and listen, unless the settings turn the HTTP port off.

        When ``http_listen`` is empty, the port is the one after that of ``beside`` (HOST:PORT), on loopback. Raise
        ``ConfigError`` when the address is malformed or in use.
        """
        self._state = Stage.STARTING
        self._step: RecoveryStep | None = None
        self._began = time.monotonic()
        self._monitored: Callable[[], Monitored] | None = None
        self._site: Callable[[], Site | None] = lambda: None
        self._authentication: Authentication | None = None
        self._has_users = bool(settings.users_file)
        self._stalls = Histogram(STALL_BOUNDS)
        self._scrapes = Scrapes(self._families)
        self._certificate: Certificate | None = None
        self._port: HttpPort | None = None
        self._watcher: Any = None
        self.address: Address | None = None
        """The address of the port; ``None`` when there is none."""
        if settings.http_listen != NONE:
            self._open(settings, beside)

    def _open(self, settings: Settings, beside: str) -> None:
        setting, where = "http_listen", settings.http_listen
        if not where:
            setting, where = f"http_listen, which is not set: the port above {beside}", _next_port(beside)
        listener = Listener(setting, resolve(setting, where, settings))
        listener.listen()
        self.address = listener.address
        self._certificate = Certificate(settings.tls_certificate, settings.tls_key) if settings.tls_certificate else None
        self._port = HttpPort(listener.socket, self._answer, self._certificate, self._pace)

    def _pace(self) -> Pace | None:
        site = self._site()
        return None if site is None else site.pace

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def page(self) -> str:
        """The address that a browser on this machine opens; empty when there is no port."""
        if self.address is None:
            return ""
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.address.host, self.address.host)  # noqa: S104 - nothing is bound
        return f"{'http' if self._certificate is None else 'https'}://{self.address._replace(host=host)}/"

    def recovering(self, step: RecoveryStep) -> None:
        """Record the progress of recovery. Any thread may call it."""
        self._state, self._step = Stage.RECOVERING, step

    def serving(
        self,
        monitored: Callable[[], Monitored],
        authentication: Authentication,
        site: Callable[[], Site | None] = lambda: None,
    ) -> None:
        """Record that the process serves.

        ``monitored`` returns the current source of metrics and readiness, ``site`` what answers below ``SITES``, if anything;
        ``authentication`` has the users.
        """
        self._state, self._step, self._monitored, self._authentication = Stage.SERVING, None, monitored, authentication
        self._site = site
        if self._port is not None:
            self._watcher = gevent.spawn(self._watch_loop)

    def stopping(self) -> None:
        """Record that the process takes no more work."""
        self._state = Stage.STOPPING

    def close(self) -> None:
        """Close the port."""
        if self._watcher is not None:
            self._watcher.kill()
        if self._port is not None:
            self._port.close()
            self._port = None

    def _watch_loop(self) -> None:
        while True:
            due = time.monotonic() + WATCH_S
            gevent.sleep(WATCH_S)
            late_s = max(0.0, time.monotonic() - due)
            self._stalls.observe(late_s)
            if self._monitored is not None:
                self._monitored().stalled(late_s)

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/" or path.startswith(SITES):
            site = self._site()
            if site is not None:
                return site(environ, start_response)
        routes = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        route = routes.get(path)
        status, content_type, body = (
            _plain("404 Not Found", f"there are: {' '.join(routes)}\n")
            if route is None
            else _plain("405 Method Not Allowed", "only GET and HEAD\n")
            if environ["REQUEST_METHOD"] not in ("GET", "HEAD")
            else self._safely(route, environ)
        )
        headers = [("Content-Type", content_type), ("Content-Length", str(len(body))), ("Connection", "close")]
        if status == UNAUTHORIZED:
            headers.append(("WWW-Authenticate", 'Basic realm="metaq"'))
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _safely(self, route: Callable[[Environ], Answer], environ: Environ) -> Answer:
        try:
            return route(environ)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # an error in one scrape must not end the process
            logger.exception("http request failed route=%s", route.__name__)
            return _plain("500 Internal Server Error", "an error of the broker, see its log\n")

    def _healthz(self, environ: Environ) -> Answer:
        return _json("200 OK", {"state": self._state})

    def _readyz(self, environ: Environ) -> Answer:
        reasons = self.reasons()
        content: dict[str, object] = {"ready": not reasons, "state": self._state, "reasons": reasons}
        if self._step is not None:
            content["recovery"] = {**self._step._asdict(), "seconds": round(time.monotonic() - self._began, 3)}
        if self._monitored is not None:
            content.update(self._monitored().facts())
        return _json(UNAVAILABLE if reasons else "200 OK", content)

    def reasons(self) -> list[str]:
        """Return the reasons why the process is not ready; empty when it is."""
        if self._state is Stage.SERVING:
            assert self._monitored is not None
            return self._monitored().reasons()
        return [_WHY_NOT[self._state]]

    def _metrics(self, environ: Environ) -> Answer:
        try:
            return self._refusal(environ) or ("200 OK", CONTENT_TYPE, self._scrapes.text().encode())
        except Overloaded as error:
            return _plain(UNAVAILABLE, f"{error}\n")

    def _refusal(self, environ: Environ) -> Answer | None:
        """Return the response to a client that may not scrape, or ``None``.

        Raise ``Overloaded`` when too many passwords are being checked.
        """
        if not self._has_users:
            return None
        if self._authentication is None:
            return _plain(UNAVAILABLE, f"who asks is known later: {self.reasons()[0]}\n")
        try:
            principal = principal_of(self._authentication, environ)
        except AccessDenied as error:
            return _plain(UNAUTHORIZED, f"{error}\n")
        try:
            demand(principal, Action.INSPECT)
        except AccessDenied as error:
            return _plain("403 Forbidden" if principal.named else UNAUTHORIZED, f"{error}\n")
        return None

    def _families(self, rest: Rest) -> Iterator[Family]:
        yield BUILD, [((metaq.__version__, FORM, platform.python_version()), 1)]
        yield READY, [((), not self.reasons())]
        yield from process_families()
        yield STALLS, [((), self._stalls)]
        if self._monitored is not None:
            yield from self._monitored().families(rest)


_WHY_NOT: Final = {
    Stage.STARTING: "the process starts",
    Stage.RECOVERING: "the store is being recovered",
    Stage.STOPPING: "the process stops",
}


def _next_port(beside: str) -> str:
    """Return the port after that of an address, on loopback; port 0 stays 0.

    A malformed address is refused later, where it is bound.
    """
    try:
        port = parse_listen("listen", beside).port
    except ConfigError:
        port = 0
    return f"{LOOPBACK}:{port + 1 if port else 0}"


def _plain(status: str, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", text.encode()


def _json(status: str, content: Mapping[str, object]) -> Answer:
    return status, "application/json", orjson.dumps(content, option=orjson.OPT_APPEND_NEWLINE)
