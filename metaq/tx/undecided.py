"""The facts about one broker's XA branches: their table, their topics, the disk space reserved for them, messages at hand."""

from collections.abc import Sequence
from typing import Final

from metaq.store.messagestore import MessageStore
from metaq.tx.branches import Branches
from metaq.tx.journal import Held
from metaq.tx.openbranches import Room
from metaq.tx.places import bytes_of
from metaq.tx.states import Decision
from metaq.tx.topics import BranchTopics, Topics

RECENT_BYTES: Final = 8 * 1024 * 1024


class _Recent:
    """Messages that were parked recently: they need not be read again when their branch commits soon, as most do."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[list[Held], int]] = {}  # by place
        self._bytes = 0

    def add(self, place: int, messages: list[Held], size: int) -> None:
        self._messages[place] = messages, size
        self._bytes += size
        while self._bytes > RECENT_BYTES:
            self.take(next(iter(self._messages)))

    def take(self, place: int) -> list[Held]:
        """Remove and return the messages of a branch; empty when they must be read."""
        messages, size = self._messages.pop(place, ([], 0))
        self._bytes -= size
        return messages


class Undecided:
    """The branches of one store. Changes are outcomes of steps, and marks that a start finds in the log."""

    def __init__(self, store: MessageStore, room: Room) -> None:
        self.branches: Branches[Held] = Branches(room)
        self.topics = BranchTopics()
        self.recent = _Recent()
        self._store = store

    # -- outcomes of steps --------------------------------------------------------------------------------------------

    def reserve(self, place: int) -> None:
        """Reserve disk space for the real messages of a branch, which may have to be stored when the disk is full."""
        self._store.reserved_bytes += bytes_of(place)

    def prepared(self, key: str, place: int, messages: list[Held], size: int, topics: Topics) -> None:
        """Note that a branch is prepared."""
        self.recent.add(place, messages, size)
        self.branches.prepared(key, place)
        self.topics.note(key, topics)

    def refused(self, key: str, place: int) -> None:
        """Note that a branch could not be prepared."""
        self._release(place)
        self.branches.failed(key)

    def decided(self, key: str) -> None:
        """Note that a branch was committed or rolled back, by its transaction manager or by an operator."""
        place = self.branches.place(key)
        if place is not None:
            self._release(place)
            self.recent.take(place)
        self.branches.done(key)
        self._forget_topics(key)

    def forgotten(self, key: str) -> None:
        """Note that an operator's decision is forgotten."""
        self.branches.done(key)
        self._forget_topics(key)

    def moved(self, key: str, place: int, topics: Topics) -> None:
        """Note that the messages of a prepared branch were parked again, at ``place``."""
        before = self.branches.place(key)
        if before is not None:
            self.recent.take(before)
        self.branches.move(key, place)
        self.topics.note(key, topics)

    # -- restoring, mark by mark in the order of the log; a mark may be applied again -----------------------------------

    def restore_prepared(self, key: str, place: int, topics: Sequence[str] | None) -> None:
        """Restore a branch that was prepared, or whose messages moved."""
        self._release(self.branches.place(key))
        self.branches.restore_prepared(key, place)
        self.topics.restore(key, topics)
        self.reserve(place)

    def restore_decided(self, key: str) -> None:
        """Remove a branch that was committed or rolled back."""
        self._release(self.branches.place(key))
        self.branches.restore_decided(key)
        self._forget_topics(key)

    def restore_heuristic(self, key: str, outcome: Decision, topics: Sequence[str] | None) -> None:
        """Restore an operator's decision on a prepared branch."""
        self._release(self.branches.place(key))
        self.branches.restore_heuristic(key, outcome)
        self.topics.note(key, topics)

    def restore_forgotten(self, key: str) -> None:
        """Remove an operator's decision that was forgotten."""
        self.branches.restore_forgotten(key)
        self._forget_topics(key)

    def _release(self, place: int | None) -> None:
        if place is not None:
            self._store.reserved_bytes -= bytes_of(place)

    def _forget_topics(self, key: str) -> None:
        if not self.branches.is_kept(key):
            self.topics.forget(key)
