"""Spans: sets of ordinals as text, in which neighbours stand together. ``3 7-9`` has 3, 7, 8 and 9."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from metaq.errors import BadRequest

MOST_CHARACTERS: Final = 3800
"""Of the text: it goes with others into one header (``metaq.protocol.remoting.attributes.MOST_CHARACTERS``)."""
_TEXT: Final = r"(?:[0-9]{1,18}(?:-[0-9]{1,18})?(?: [0-9]{1,18}(?:-[0-9]{1,18})?)*)?"
OrdinalSpan = tuple[int, int]
"""All ordinals from the first to the last."""


class Spans:
    """Some ordinals, as spans that rise and do not touch."""

    __slots__ = ("spans",)

    def __init__(self, spans: tuple[OrdinalSpan, ...] = ()) -> None:
        self.spans = spans

    @classmethod
    def read(cls, text: str) -> "Spans":
        """Return the spans that a text has. Raise ``BadRequest`` when it is none."""
        if len(text) > MOST_CHARACTERS or not re.fullmatch(_TEXT, text):
            raise BadRequest(f"{text[:40]!r} is no list of spans as '3 7-9' of at most {MOST_CHARACTERS} characters")
        pairs = (part.partition("-") for part in text.split())
        return cls()._joined((int(first), int(last or first)) for first, _, last in pairs)

    @classmethod
    def of(cls, ordinals: Iterable[int], begin: int) -> "Spans":
        """Return some ordinals, and all that are below ``begin``."""
        return cls(((0, begin - 1),) if begin else ())._joined((ordinal, ordinal) for ordinal in ordinals)

    def __str__(self) -> str:
        return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in self.spans)

    def __contains__(self, ordinal: int) -> bool:
        at = bisect_right(self.spans, ordinal, key=_first)
        return at > 0 and self.spans[at - 1][1] >= ordinal

    def __or__(self, other: "Spans") -> "Spans":
        return self._joined(other.spans)

    def count(self, begin: int, end: int) -> int:
        """Return how many there are from ``begin`` on and before ``end``."""
        return sum(max(0, min(last + 1, end) - max(first, begin)) for first, last in self.spans)

    def _joined(self, others: Iterable[OrdinalSpan]) -> "Spans":
        found: list[OrdinalSpan] = []
        for first, last in sorted((*self.spans, *others)):
            if found and first <= found[-1][1] + 1:
                found[-1] = found[-1][0], max(last, found[-1][1])
            elif first <= last:
                found.append((first, last))
        return Spans(tuple(found))


def _first(span: OrdinalSpan) -> int:
    return span[0]
