"""The parts of pages: the request of a browser, and the kinds of routes that answer one.

To add a page:

1. Write its functions in a module of ``metaq.server.console.pages``. A function takes a ``Visit``, asks services through
   ``visit.call``, and returns the values of its template. Rights are the services'; errors (``MetaqError``) become pages.
2. Write its template in ``templates``: it extends ``base.html`` and fills the blocks ``title`` and ``main``. Every value is
   escaped. ``macros.html`` has fields, times, and ``live``: what it marks is loaded again every few seconds. A list is a
   ``list_page`` or a ``rows_page``, and its template extends ``list.html``.
3. Name its routes in ``ROUTES`` of its module, and the module in ``metaq.server.console.routes``; a page that people should
   find without a link gets a line in ``SECTIONS`` there.

A change is a ``PageChange``: a function that changes something and returns where the browser goes on, and the page that has its
form. The form posts to the address of the change and begins with the macro ``secured``, which has the token that every change
needs. When the change fails, the page of its form is shown again, with the sentence of the error and what was typed (``sent``).
A change that cannot be undone has a form that shows first what it would do (``confirm.html``, ``group_reset.html``).
"""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from metaq.errors import BadRequest
from metaq.server.services.call import Call
from metaq.server.services.rows import Input, Output, RowPage, read_input

ROOT: Final = "/console"
PAGE_ROWS: Final = 50
"""Rows of a page of a list."""

_NOT_KEPT: Final = ("after", "limit", "done", "count")
"""Fields of an address that are of one page of a list only."""

T = TypeVar("T", bound=Input)


class Visit:
    """One request of a browser, as a page sees it."""

    def __init__(self, call: Call, path: Mapping[str, str], query: Mapping[str, str], sent: Mapping[str, str]) -> None:
        """Take the call of the user, the parameters of the path and of the query, and the fields of a form that was sent."""
        self.call = call
        self.path = path
        self.query = query
        self.sent = sent
        self.changed = False
        """True when a change was made, or a part of it was or may have been: it is noted even when it fails."""

    def asked(self, kind: type[T], **more: object) -> T:
        """Return an input made of the query's fields that it has. Raise ``BadRequest``."""
        return _read(kind, {**self.query, **more}, "the query")

    def given(self, kind: type[T], **more: object) -> T:
        """Return an input made of the sent fields that it has. Raise ``BadRequest``."""
        return _read(kind, {**self.sent, **more}, "the form")


def _read(kind: type[T], fields: Mapping[str, object], what: str) -> T:
    """Return an input; a field that was left empty was not given."""
    known = {name: fields[name] for name in kind.__struct_fields__ if fields.get(name) not in (None, "")}
    read: T = read_input(known, kind, what)
    return read


class GoTo(NamedTuple):
    """The place where a browser goes on after a change."""

    path: str
    notice: str = ""
    """A key of ``NOTICES``."""
    number: int = 0
    """The ``{count}`` of the notice."""


NOTICES: Final = {
    "created": "Created.",
    "changed": "Changed.",
    "deleted": "Deleted.",
    "published": "Published.",
    "delayed": "Published: it is delivered when its time comes.",
    "reset": "The offsets were reset.",
    "replayed": "Sent {count} again.",
    "discarded": "Discarded {count}.",
    "cancelled": "Cancelled: it is not delivered.",
    "ended": "Ended: no run comes any more.",
    "decided": "Decided.",
    "handed-over": "Handed over: this replica is a slave in a moment.",
    "promoted": "Promoted: this replica is master in a moment.",
    "demoted": "Demoted: this replica is a slave in a moment.",
}
"""What was done, by the word that stands for it in an address; ``{count}`` is the only other thing that an address can say."""


class PageView(NamedTuple):
    """A page."""

    path: str
    """Below ``ROOT``, with the names of parameters in braces."""
    template: str
    show: Callable[[Visit], Mapping[str, Any]]


def list_page(
    path: str,
    template: str,
    query: type[T],
    show: Callable[[Visit, T], Mapping[str, Any]],
    limit: int = PAGE_ROWS,
    **fields: Callable[[Visit], object],
) -> PageView:
    """Return a page with a list (``list.html``) that is searched, and comes in pages of ``limit`` rows in its service's order.

    ``show`` returns the rows as ``page``, and what else the template needs. The query is made of the address; ``fields`` of it
    that need more are asked for by name. Pages of the list keep what was searched.
    """

    def show_list(visit: Visit) -> Mapping[str, Any]:
        asked = visit.asked(query, limit=limit, **{name: ask(visit) for name, ask in fields.items()})
        shown = show(visit, asked)
        segments = [segment.format(**visit.path) for segment in path.strip("/").split("/")]
        kept = {name: value for name, value in visit.query.items() if name not in _NOT_KEPT}
        first, following = link(*segments, **kept), link(*segments, **kept, after=shown["page"].next)
        return {**visit.path, "query": asked, "first": first, "following": following, **shown}

    return PageView(path, template, show_list)


def rows_page(path: str, template: str, query: type[T], rows: Callable[[Call, T], RowPage[Any]]) -> PageView:
    """Return the ``list_page`` of a service that returns rows, where the template needs nothing else."""
    return list_page(path, template, query, lambda visit, asked: {"page": rows(visit.call, asked)})


class PageChange(NamedTuple):
    """A change, by a form that posts to its path."""

    path: str
    act: Callable[[Visit], GoTo]
    form: PageView


class PageStream(NamedTuple):
    """Values of a template as they come, as server-sent events of HTML; ``None`` when there is nothing for a while."""

    path: str
    template: str
    rows: Callable[[Visit], Iterator[Mapping[str, Any] | None]]


class PageFile(NamedTuple):
    """A file to keep: its name, and its bytes."""

    path: str
    fetch: Callable[[Visit], tuple[str, bytes]]


class PageExport(NamedTuple):
    """A file of any length: its name, and its parts, each made when the one before has been sent."""

    path: str
    fetch: Callable[[Visit], tuple[str, Iterator[bytes]]]


class PageData(NamedTuple):
    """Numbers for a script of the page, as JSON."""

    path: str
    fetch: Callable[[Visit], Output]


Route = PageView | PageChange | PageStream | PageFile | PageExport | PageData


def link(*segments: object, **query: object) -> str:
    """Return the address of a page; whatever is in a segment or a parameter stays in it."""
    path = "/".join([ROOT, *(quote(str(segment), safe="") for segment in segments)])
    given = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def time_ms(text: str) -> int | None:
    """Return a time that was typed, as Unix milliseconds; ``None`` for an empty text. Raise ``BadRequest``.

    It is as browsers write it, without a zone, and in UTC.
    """
    if not text:
        return None
    try:
        parsed = datetime.fromisoformat(text)
        return max(0, int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000))
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"{text[:40]!r} is no time; write it as 2026-01-31T12:00, in UTC") from error
