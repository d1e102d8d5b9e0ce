"""To which topics the messages of undecided branches go: who may not publish there has no say in what becomes of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from metaq.tx.journal import Held

Topics = tuple[str, ...]
"""Of the messages of one branch, each once."""

_SHARED: Final = 1024


class BranchTopics:
    """The topics of prepared branches, and of those that an operator has decided."""

    def __init__(self) -> None:
        self._of: dict[str, Topics] = {}
        self._shared: dict[Topics, Topics] = {}  # most branches have the topics of others
        self.unknown: set[str] = set()
        """Keys of prepared branches of an older version, whose messages tell the topics."""

    def get(self, key: str) -> Topics | None:
        """``None`` when they are not known."""
        return self._of.get(key)

    def note(self, key: str, topics: Sequence[str] | None) -> None:
        """``None``: nothing can tell them."""
        self.unknown.discard(key)
        if topics is None:
            return
        if len(self._shared) >= _SHARED:
            self._shared.clear()
        names = tuple(topics)
        self._of[key] = self._shared.setdefault(names, names)

    def restore(self, key: str, topics: Sequence[str] | None) -> None:
        """Of a prepared branch, as a mark or the snapshot says; ``None``: an older version wrote it, and it says nothing."""
        if topics is not None:
            self.note(key, topics)
        elif key not in self._of:
            self.unknown.add(key)

    def forget(self, key: str) -> None:
        self._of.pop(key, None)
        self.unknown.discard(key)

    def all(self) -> Mapping[str, Topics]:
        """By key, as they are now."""
        return dict(self._of)


def topics_of(messages: Iterable[Held]) -> Topics:
    """The topics of messages, in order."""
    return tuple(sorted({message.queue.topic for message in messages}))
