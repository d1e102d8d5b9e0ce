"""Spans: sets of ordinals as text, in which neighbours stand together. ``3 7-9`` has 3, 7, 8 and 9."""

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from metaq.errors import BadRequest

MOST_CHARACTERS: Final = 3800
"""Of the text: it goes with others into one header (``metaq.protocol.remoting.attributes.MOST_CHARACTERS``)."""
_TEXT: Final = re.compile(r"(?:\d{1,18}(?:-\d{1,18})?(?: \d{1,18}(?:-\d{1,18})?)*)?", re.ASCII)


class OrdinalSpan(NamedTuple):
    """All ordinals from the first to the last."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Some ordinals, as spans that rise and do not touch."""

    spans: tuple[OrdinalSpan, ...] = ()

    @classmethod
    def read(cls, text: str) -> "Spans":
        """Return the spans that a text has. Raise ``BadRequest`` when it is none."""
        if len(text) > MOST_CHARACTERS or not _TEXT.fullmatch(text):
            raise BadRequest(f"{text[:40]!r} is no list of spans as '3 7-9' of at most {MOST_CHARACTERS} characters")
        pairs = (part.partition("-") for part in text.split())
        return cls()._joined(OrdinalSpan(int(first), int(last or first)) for first, _, last in pairs)

    def __str__(self) -> str:
        return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in self.spans)

    def __contains__(self, ordinal: object) -> bool:
        if not isinstance(ordinal, int):
            return False
        at = bisect_right(self.spans, ordinal, key=lambda span: span.first)
        return at > 0 and self.spans[at - 1].last >= ordinal

    def with_all(self, ordinals: Iterable[int], least: int) -> "Spans":
        """Return these and others, without those below ``least``."""
        joined = self._joined(OrdinalSpan(ordinal, ordinal) for ordinal in ordinals)
        return Spans(tuple(OrdinalSpan(max(first, least), last) for first, last in joined.spans if last >= least))

    def count(self, begin: int, end: int) -> int:
        """Return how many there are from ``begin`` on and before ``end``."""
        return sum(max(0, min(last + 1, end) - max(first, begin)) for first, last in self.spans)

    def _joined(self, others: Iterable[OrdinalSpan]) -> "Spans":
        found: list[OrdinalSpan] = []
        for first, last in sorted((*self.spans, *others)):
            if found and first <= found[-1].last + 1:
                found[-1] = OrdinalSpan(found[-1].first, max(last, found[-1].last))
            elif first <= last:
                found.append(OrdinalSpan(first, last))
        return Spans(tuple(found))
