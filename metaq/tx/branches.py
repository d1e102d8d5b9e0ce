"""The table of XA branches: over opaque messages, without any I/O (specs: text protocol, section 5).

An open branch holds its messages in memory. A prepared one is only a number, its *place*, by which the caller finds the
messages in the log: it costs one dictionary entry and the text of its key. What a command does in which state is in
``metaq.tx.states``. Keys are canonical texts (``metaq.tx.xid``).
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar, cast

from metaq.tx.openbranches import Counts, OpenBranch, OpenBranches, Room
from metaq.tx.states import STEPS, TABLE, ContentChange, Decision, Event, Refusal, State, Transition, refused
from metaq.tx.xid import qualifier_of

T = TypeVar("T")


class Work(NamedTuple, Generic[T]):
    """The content of a branch: the messages of an open one, or the place of a prepared one."""

    messages: list[T]
    place: int | None


class _Busy(NamedTuple):
    """The step that a branch is in."""

    state: State
    outcome: Decision | None
    """The operator's decision that is on its way."""


class Branches(Generic[T]):
    """The XA branches of one broker; any connection may use any of them."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._open: OpenBranches[str, T] = OpenBranches(room)
        self._places: dict[str, int] = {}
        self._decisions: dict[str, Decision] = {}
        self._busy: dict[str, _Busy] = {}

    # -- commands -----------------------------------------------------------------------------------------------------

    def begin(self, key: str, now_s: float, timeout_s: float) -> None:
        """Open a branch that expires after ``timeout_s``, never when that is 0; one that is open or prepared stays as it is.

        ``XaError`` (RMERR) when there are too many branches.
        """
        if self._transition(key, Event.BEGIN).action is ContentChange.OPEN:
            self._room.check_branches(len(self._open) + len(self._places) + len(self._decisions))
            self._open.begin(key, now_s, timeout_s)

    def open(self, key: str) -> OpenBranch[T]:
        """Return an open branch, valid until the next command. ``XaError``, as a put reports it, when it is not open."""
        branch = self._open.get(key)
        if branch is None or key in self._busy:  # the states that refuse a put; the table knows why
            self._transition(key, Event.PUT)
        assert branch is not None
        return branch

    def put(self, key: str, message: T, size: int) -> None:
        """Add a message of ``size`` bytes to an open branch. ``XaError`` (RMERR) beyond a limit; the branch stays open."""
        self.open(key).put(message, size)

    def prepare(self, key: str) -> list[T]:
        """Begin to prepare and return the messages, which the caller parks; then it calls ``prepared`` or ``failed``.

        Without messages the branch is read-only: it is gone, and the answer is RDONLY (3).
        """
        return self._command(key, Event.PREPARE).messages

    def size(self, key: str) -> int:
        """Return the bytes that an open branch holds."""
        branch = self._open.get(key)
        assert branch is not None
        return branch.held

    def commit(self, key: str, *, one_phase: bool) -> Work[T]:
        """Begin to commit; return what to make visible, if anything. Then the caller calls ``done`` or ``failed``."""
        return self._command(key, Event.COMMIT_ONE_PHASE if one_phase else Event.COMMIT_TWO_PHASE)

    def rollback(self, key: str) -> Work[T]:
        """Roll back an open branch at once, or begin to roll back a prepared one; return what is dropped.

        With a place in the result, the branch was prepared: then the caller calls ``done`` or ``failed``.
        """
        return self._command(key, Event.ROLLBACK)

    def forget(self, key: str) -> bool:
        """Return whether there is an operator's decision to forget; if so, the caller then calls ``done`` or ``failed``."""
        self._command(key, Event.FORGET)
        return key in self._busy

    def decide(self, key: str, outcome: Decision) -> Work[T]:
        """Begin an operator's decision on a prepared branch; then the caller calls ``done`` or ``failed``."""
        return self._command(key, Event.DECIDE, outcome)

    def recover(self, qualifier: str | None) -> list[str]:
        """Return the sorted keys of all prepared and heuristic branches, of one resource manager or of all."""
        keys = self._places.keys() | self._decisions.keys()
        return sorted(key for key in keys if not qualifier or qualifier_of(key) == qualifier)

    def expire(self, now_s: float) -> list[str]:
        """Roll back the open branches whose timeout has passed, unless they are busy; return their keys."""
        due = self._open.due(now_s)
        for key in due:
            self._command(key, Event.TIMEOUT)
        return [key for key in due if key not in self._busy]

    # -- second halves ------------------------------------------------------------------------------------------------

    def prepared(self, key: str, place: int) -> None:
        """Note that the messages are parked at ``place``: the branch is prepared."""
        self._end(key, Event.STORED, place)

    def done(self, key: str) -> None:
        """Complete a commit, a rollback, a decision or a FORGET, which the log now holds."""
        self._end(key, Event.STORED)

    def failed(self, key: str) -> None:
        """Undo a step that could not be stored: an open branch is rolled back, a prepared or heuristic one is as it was."""
        self._end(key, Event.FAILED)

    def move(self, key: str, place: int) -> None:
        """Set the new place of a branch whose messages were parked again; one that was decided meanwhile stays decided."""
        if key in self._places:
            self._places[key] = place

    # -- restoring, mark by mark in the order of the log; a mark may be applied again -----------------------------------

    def restore_prepared(self, key: str, place: int) -> None:
        """Restore a branch that was prepared, or whose messages moved."""
        self._places[key] = place

    def restore_decided(self, key: str) -> None:
        """Remove a branch that was committed or rolled back."""
        self._places.pop(key, None)

    def restore_heuristic(self, key: str, outcome: Decision) -> None:
        """Restore an operator's decision on a prepared branch."""
        self._places.pop(key, None)
        self._decisions[key] = outcome

    def restore_forgotten(self, key: str) -> None:
        """Remove an operator's decision that was forgotten."""
        self._decisions.pop(key, None)

    # -- looking ------------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self._open or self.is_kept(key)

    def is_kept(self, key: str) -> bool:
        """Return whether a branch is prepared or heuristic."""
        return key in self._places or key in self._decisions

    def messages(self, key: str) -> list[T] | None:
        """Return the messages of an open branch; ``None`` when it is not open."""
        branch = self._open.get(key)
        return None if branch is None else branch.messages

    def place(self, key: str) -> int | None:
        """Return the place of a prepared branch, which may be busy; ``None`` when it is not prepared."""
        return self._places.get(key)

    def is_busy(self, key: str) -> bool:
        """Return whether a step of the branch is on its way into the log."""
        return key in self._busy

    def state(self, key: str) -> State:
        """Return the state of a branch."""
        busy = self._busy.get(key)
        if busy is not None:
            return busy.state
        branch = self._open.get(key)
        if branch is not None:
            return State.OPEN if branch.messages else State.EMPTY
        if key in self._places:
            return State.PREPARED
        return State.HEURISTIC if key in self._decisions else State.NONE

    def places(self) -> Iterator[tuple[str, int]]:
        """Return the keys and places of prepared branches, the one that has waited longest first."""
        return iter(self._places.items())

    def heuristics(self) -> Iterator[tuple[str, Decision]]:
        """Return operators' decisions that are not forgotten, by key, the oldest first."""
        return iter(self._decisions.items())

    def counts(self) -> Counts:
        """Return how many branches there are in each state."""
        return Counts(len(self._open), len(self._places), len(self._decisions), self._open.oldest_s)

    # -- from state to state ------------------------------------------------------------------------------------------

    def _transition(self, key: str, event: Event) -> Transition:
        """Return what an event does to a branch now. ``XaError`` when it is refused."""
        state = self.state(key)
        cell = TABLE[state, event]
        if isinstance(cell, Refusal):
            raise refused(cell, state, event, key, self._decisions.get(key))
        return cell

    def _command(self, key: str, event: Event, outcome: Decision | None = None) -> Work[T]:
        """Do what the table says; return the content that the branch had before. ``XaError`` when the command is refused."""
        action, state = self._transition(key, event)
        work = Work(self.messages(key) or [], self._places.get(key))
        if action is ContentChange.STAGE:
            assert state is not None
            self._busy[key] = _Busy(state, outcome)
        elif action is ContentChange.DROP:
            self._open.close(key)
        return work

    def _end(self, key: str, event: Event, place: int | None = None) -> None:
        """End the step that a branch is in, as the table says; ``place`` is that of messages that have been parked."""
        state, outcome = self._busy.pop(key)
        cell = TABLE[state, event]
        assert isinstance(cell, Transition)
        assert (cell.action is ContentChange.PARK) == (place is not None), f"branch {key} is being {STEPS[state]}"
        match cell.action:
            case ContentChange.DROP:
                self._open.close(key)
            case ContentChange.PARK:
                self._open.close(key)
                self.restore_prepared(key, cast(int, place))
            case ContentChange.RELEASE:
                self.restore_decided(key)
            case ContentChange.RECORD:
                self.restore_heuristic(key, cast(Decision, outcome))
            case ContentChange.ERASE:
                self.restore_forgotten(key)
