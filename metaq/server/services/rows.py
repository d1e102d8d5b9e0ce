"""The types that inputs and rows of several services share; whatever is declared is checked, and is in the API's document."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Annotated, Any, Final, Generic, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, json

from metaq.errors import BadRequest
from metaq.server.services.call import Call

MOST_ROWS: Final = 500
"""Rows in one page: a few milliseconds of work."""
_INT64: Final = (1 << 63) - 1

T = TypeVar("T")


class Input(Struct, forbid_unknown_fields=True, frozen=True):
    """An input of a user; names that are not declared are refused."""


class Output(Struct, frozen=True):
    """A row, or another answer to a user."""


class RowPage(Output, Generic[T], frozen=True):
    """Some rows of a list."""

    rows: list[T]
    next: Annotated[str | None, Meta(description="The `after` of the next page; null on the last one.")]


class Done(Output, frozen=True):
    """A change that was made."""

    done: bool = True


Name = Annotated[str, Meta(min_length=1, max_length=255)]
OffsetId = Annotated[str, Meta(min_length=1, max_length=64, description="An id that the broker made.")]
Limit = Annotated[int, Meta(ge=1, le=MOST_ROWS, description="The most rows.")]
After = Annotated[str, Meta(max_length=1024, description="The `next` of the page before.")]
Search = Annotated[str, Meta(max_length=255, description="Only names that contain this text.")]
Number = Annotated[int, Meta(ge=0, le=_INT64)]
Partition = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Milliseconds = Annotated[int, Meta(ge=0, le=_INT64, description="Milliseconds.")]
UnixMs = Annotated[int, Meta(ge=0, le=_INT64, description="A time, as milliseconds since 1970 (UTC).")]


def read_input(value: Any, kind: Any, what: str) -> Any:
    """Return a value of a declared type, made from texts. Raise ``BadRequest``; ``what`` names the value in its sentence."""
    try:
        return convert(value, kind, strict=False)
    except ValidationError as error:
        raise BadRequest(f"{what}: {error}") from error


def as_json(answer: Output) -> bytes:
    """Return an answer as JSON."""
    return json.encode(answer)


def as_json_lines(rows: Sequence[Output]) -> bytes:
    """Return rows as JSON, each on a line."""
    return json.Encoder().encode_lines(rows)


class NamesQuery(Input, frozen=True):
    """The names of a list that are wanted."""

    search: Search = ""
    after: After = ""
    limit: Limit = 100


def page_of(
    call: Call, items: Iterable[Any], query: NamesQuery, name: Callable[[Any], str], row: Callable[[Any], T]
) -> RowPage[T]:
    """Return a page of items that come in the order of their names; others run while its rows are made."""
    found = list(islice((it for it in items if name(it) > query.after and query.search in name(it)), query.limit + 1))
    rows: list[T] = []
    for number, item in enumerate(found[: query.limit], 1):
        rows.append(row(item))
        call.rest_after(number)
    return RowPage(rows=rows, next=name(found[query.limit - 1]) if len(found) > query.limit else None)
