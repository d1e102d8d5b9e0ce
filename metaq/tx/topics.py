"""The topics of undecided branches' messages: a client that may not publish to them may not decide the branch either."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from metaq.tx.journal import Held

Topics = tuple[str, ...]
"""The topics of the messages of one branch, each once."""

_SHARED: Final = 1024


class BranchTopics:
    """The topics of prepared branches, and of those that an operator has decided, by key."""

    def __init__(self) -> None:
        self._of: dict[str, Topics] = {}
        self._shared: dict[Topics, Topics] = {}  # most branches have the topics of others
        self.unknown: set[str] = set()
        """Keys of branches that an older version prepared: their topics are to be found in their messages."""

    def get(self, key: str) -> Topics | None:
        """Return the topics of a branch; ``None`` when they are not known."""
        return self._of.get(key)

    def note(self, key: str, topics: Sequence[str] | None) -> None:
        """Store the topics of a branch; ``None`` when they cannot be found. ``unknown`` no longer has the branch."""
        self.unknown.discard(key)
        if topics is None:
            return
        if len(self._shared) >= _SHARED:
            self._shared.clear()
        names = tuple(topics)
        self._of[key] = self._shared.setdefault(names, names)

    def restore(self, key: str, topics: Sequence[str] | None) -> None:
        """Store the topics of a prepared branch from its mark or the snapshot; ``None`` when an older version wrote that."""
        if topics is not None:
            self.note(key, topics)
        elif key not in self._of:
            self.unknown.add(key)

    def forget(self, key: str) -> None:
        self._of.pop(key, None)
        self.unknown.discard(key)

    def all(self) -> Mapping[str, Topics]:
        """Return a copy of the topics by key."""
        return dict(self._of)


def topics_of(messages: Iterable[Held]) -> Topics:
    """Return the topics of messages, sorted, each once."""
    return tuple(sorted({message.queue.topic for message in messages}))
