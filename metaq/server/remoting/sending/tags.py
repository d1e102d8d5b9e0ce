"""The part of a record that comes from its message's tag, made once for each tag."""

from typing import Final

from metaq.protocol.record import java_hash
from metaq.protocol.text.messages import HEADER_SIZE_TEXT

MOST_KNOWN: Final = 1024
"""Tags that are remembered."""
LONGEST_KNOWN: Final = 128
"""Characters of a tag that is remembered."""


class Tag:
    """The part of a record that comes from the message's tag."""

    __slots__ = ("hash", "text_size")

    def __init__(self, code: int, text_size: int) -> None:
        self.hash = code
        self.text_size = text_size
        """The bytes of the message for text readers, without its body."""


NO_TAG: Final = Tag(0, HEADER_SIZE_TEXT)


class Tags:
    """The tags of one broker's messages."""

    def __init__(self) -> None:
        self._known: dict[str, Tag] = {}

    def of(self, name: str) -> Tag:
        """Return a tag by its name."""
        known = self._known.get(name)
        if known is None:
            known = Tag(java_hash(name), HEADER_SIZE_TEXT + 4 + len(name.encode()))
            if len(name) <= LONGEST_KNOWN:
                if len(self._known) == MOST_KNOWN:
                    self._known.clear()
                self._known[name] = known
        return known
