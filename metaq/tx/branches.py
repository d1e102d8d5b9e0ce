"""Tables of transaction branches: state machines over opaque messages, without any I/O (specs: text protocol, section 5).

An XA branch::

    BEGIN ──▶ OPEN ──prepare──▶ PREPARED ──decide──▶ HEURISTIC ──forget──▶ gone
               │                    │
               └──commit, rollback, └──commit, rollback──▶ gone
                  expire──▶ gone

An open branch holds its messages in memory. A prepared one is only a number, its *place*, by which the caller finds the
messages in the log: it costs one dictionary entry and the text of its key. A heuristic one was decided by an operator; it is
remembered until FORGET. BEGIN opens a new branch of the same name beside it, which hides it until the new branch is gone.

A step that the log must remember has two halves, because an append fails or succeeds only later. The first is the command
itself, after which the branch is *busy* and refuses every other command with RMFAIL. The second is a call of ``prepared``,
``refused``, ``done`` or ``failed``.

Keys are canonical texts (``metaq.tx.xid``). This module reads no clock: callers pass seconds of any monotonic one.
"""

import enum
from collections.abc import Container, Hashable, Iterator
from heapq import heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

from metaq.errors import MetaqError
from metaq.tx.xid import qualifier_of

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_STALE_KEPT: Final = 1024


class XaCode(enum.IntEnum):
    """Return codes of X/Open XA, under the specification's names without ``XA_`` and ``XAER_``."""

    OK = 0
    RDONLY = 3
    HEURRB = 6
    HEURCOM = 7
    HEURHAZ = 8
    RBOTHER = 104
    RBTIMEOUT = 106
    RMERR = -3
    NOTA = -4
    INVAL = -5
    PROTO = -6
    RMFAIL = -7
    DUPID = -8


class XaError(MetaqError):
    """A refused transaction command: the reply has the status 500 and the body ``wire``."""

    def __init__(self, code: XaCode, text: str, *, bare: bool = False) -> None:
        """Make a refusal; ``bare`` when clients expect the text without the code, as for local transactions and for puts."""
        super().__init__(text)
        self.code = code
        self.bare = bare

    @property
    def wire(self) -> str:
        """``XAException:code=<n>,msg=<text>``, or the text alone; on one line, because clients match only the first."""
        text = " ".join(str(self).splitlines())
        return text if self.bare else f"XAException:code={int(self.code)},msg={text}"


class Outcome(enum.StrEnum):
    """An operator's decision on a prepared branch."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    COMPLETE = "complete"
    """The branch is dropped, as neither committed nor rolled back."""


_HEURISTIC: Final = {
    Outcome.COMMIT: (XaCode.HEURCOM, "committed"),
    Outcome.ROLLBACK: (XaCode.HEURRB, "rolled back"),
    Outcome.COMPLETE: (XaCode.HEURHAZ, "completed"),
}


class _Step(enum.Enum):
    """The step that a busy branch is in."""

    PREPARE = "prepared"
    COMMIT = "committed"
    ROLLBACK = "rolled back"
    DECIDE = "decided by an operator"
    FORGET = "forgotten"


class Work(NamedTuple, Generic[T]):
    """The content of a branch: the messages of an open one, or the place of a prepared one."""

    messages: list[T]
    place: int | None


class Counts(NamedTuple):
    """The numbers of branches that a table holds now."""

    open: int
    prepared: int
    heuristic: int
    oldest_open_s: float | None
    """When the oldest open branch began, by the clock of ``begin``; ``None`` without one."""


# -- open branches ----------------------------------------------------------------------------------------------------


class Room:
    """Limits of branches, and the bytes that all open ones hold; several tables may share one."""

    __slots__ = ("max_branch_bytes", "max_branches", "max_open_transaction_bytes", "max_timeout_s", "open_bytes")

    def __init__(
        self, *, max_branches: int, max_branch_bytes: int, max_open_transaction_bytes: int, max_timeout_s: float
    ) -> None:
        """Set the limits. ``max_branches``: of one table, with undecided ones. Longer timeouts become ``max_timeout_s``."""
        self.max_branches = max_branches
        self.max_branch_bytes = max_branch_bytes
        self.max_open_transaction_bytes = max_open_transaction_bytes
        self.max_timeout_s = max_timeout_s
        self.open_bytes = 0

    def take_limits(self, other: "Room") -> None:
        """Adopt the limits of another room; what exceeds one of them stays, but cannot grow."""
        self.max_branches, self.max_branch_bytes = other.max_branches, other.max_branch_bytes
        self.max_open_transaction_bytes, self.max_timeout_s = other.max_open_transaction_bytes, other.max_timeout_s

    def check_branches(self, count: int) -> None:
        """Raise ``XaError`` (RMERR) when a table that has ``count`` branches may not have another."""
        if count >= self.max_branches:
            raise XaError(
                XaCode.RMERR,
                f"{count} transactions are open or undecided, the limit is {self.max_branches} (max_branches); "
                "decide those that are prepared, or try again later",
            )

    def check_bytes(self, held: int, size: int) -> None:
        """Raise ``XaError`` (RMERR) when a branch that holds ``held`` bytes may not take ``size`` more."""
        if held + size > self.max_branch_bytes:
            raise XaError(
                XaCode.RMERR,
                f"{size} bytes more than {held} in one transaction are over the limit of {self.max_branch_bytes} "
                "(max_branch_bytes); the message was not stored; commit the transaction or roll it back",
            )
        if self.open_bytes + size > self.max_open_transaction_bytes:
            raise XaError(
                XaCode.RMERR,
                f"{size} bytes more than {self.open_bytes} in all open transactions are over the limit of "
                f"{self.max_open_transaction_bytes} (max_open_transaction_bytes); the message was not stored; try again later",
            )


class OpenBranch(Generic[T]):
    """A branch that takes messages."""

    __slots__ = ("_room", "began_s", "held", "messages", "number")

    def __init__(self, room: Room, number: int, began_s: float) -> None:
        self._room = room
        self.number = number
        self.began_s = began_s
        self.messages: list[T] = []
        self.held = 0

    def put(self, message: T, size: int) -> None:
        """Add a message of ``size`` bytes. ``XaError`` (RMERR) when that would exceed a limit; the branch stays open."""
        room, held = self._room, self.held + size
        if held > room.max_branch_bytes or room.open_bytes + size > room.max_open_transaction_bytes:
            room.check_bytes(self.held, size)
        self.held = held
        room.open_bytes += size
        self.messages.append(message)


class OpenBranches(Generic[K, T]):
    """Branches whose messages are in memory, and their deadlines."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._branches: dict[K, OpenBranch[T]] = {}
        self._deadlines: list[tuple[float, int, K]] = []
        """A heap of (seconds, number of the branch, key); entries may outlive their branches."""
        self._begun = 0

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, key: K) -> bool:
        return key in self._branches

    def begin(self, key: K, now_s: float, timeout_s: float) -> None:
        """Open a branch that does not exist yet; it expires after ``timeout_s``, never when that is 0."""
        self._begun += 1
        self._branches[key] = OpenBranch(self._room, self._begun, now_s)
        if timeout_s <= 0:
            return
        heappush(self._deadlines, (now_s + min(timeout_s, self._room.max_timeout_s), self._begun, key))
        if len(self._deadlines) > 2 * len(self._branches) + _STALE_KEPT:
            self._forget_stale()

    def _forget_stale(self) -> None:
        """Drop the entries of ended branches.

        Each short transaction leaves one until its deadline: 20,000 a second for a minute would be some 150 MB.
        """
        self._deadlines = sorted(entry for entry in self._deadlines if self._is_current(entry))

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        """Return whether the branch of this entry is open; one of the same name may have followed it."""
        branch = self._branches.get(entry[2])
        return branch is not None and branch.number == entry[1]

    def __getitem__(self, key: K) -> OpenBranch[T]:
        return self._branches[key]

    def messages(self, key: K) -> list[T]:
        """Return the messages of a branch."""
        return self._branches[key].messages

    def close(self, key: K) -> list[T]:
        """End a branch; return the messages that it held."""
        branch = self._branches.pop(key)
        self._room.open_bytes -= branch.held
        return branch.messages

    def expire(self, now_s: float, spared: Container[K]) -> list[K]:
        """End the branches whose timeout has passed and that are not in ``spared``; return their keys."""
        expired: list[K] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heappop(self._deadlines)
            key = entry[2]
            # a spared branch is being prepared or committed: after that it is not open any more, whatever the outcome
            if self._is_current(entry) and key not in spared:
                self.close(key)
                expired.append(key)
        return expired

    @property
    def oldest_s(self) -> float | None:
        """The time at which the oldest branch began; ``None`` without one."""
        return next((branch.began_s for branch in self._branches.values()), None)


# -- XA branches ------------------------------------------------------------------------------------------------------


class Branches(Generic[T]):
    """The XA branches of one broker; any connection may use any of them."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._open: OpenBranches[str, T] = OpenBranches(room)
        self._prepared: dict[str, int] = {}
        self._heuristic: dict[str, Outcome] = {}
        self._busy: dict[str, _Step] = {}
        self._deciding: dict[str, Outcome] = {}

    # -- commands -----------------------------------------------------------------------------------------------------

    def begin(self, key: str, now_s: float, timeout_s: float) -> None:
        """Open a branch that expires after ``timeout_s``, never when that is 0; one that is open or prepared stays as it is.

        ``XaError`` (RMERR) when there are too many branches.
        """
        self._check_idle(key)
        if key not in self._open and key not in self._prepared:
            self._room.check_branches(len(self._open) + len(self._prepared) + len(self._heuristic))
            self._open.begin(key, now_s, timeout_s)

    def open(self, key: str) -> OpenBranch[T]:
        """Return an open branch, valid until the next command. ``XaError``, as a put reports it, when it is not open."""
        if key not in self._open or key in self._busy:
            self._check_undecided(key, bare=True)
            raise XaError(XaCode.PROTO, f"Cannot put into XA transaction '{key}': it has been prepared.")
        return self._open[key]

    def put(self, key: str, message: T, size: int) -> None:
        """Add a message of ``size`` bytes to an open branch. ``XaError`` (RMERR) beyond a limit; the branch stays open."""
        self.open(key).put(message, size)

    def prepare(self, key: str) -> list[T]:
        """Begin to prepare and return the messages, which the caller parks; then it calls ``prepared`` or ``refused``.

        Without messages the branch is read-only: it is gone, and the answer is RDONLY (3).
        """
        self._check_undecided(key)
        if key in self._prepared:
            raise XaError(XaCode.PROTO, "Cannot call prepare now.")
        messages = self._open.messages(key)
        if messages:
            self._busy[key] = _Step.PREPARE
        else:
            self._open.close(key)
        return messages

    def size(self, key: str) -> int:
        """Return the bytes that an open branch holds."""
        return self._open[key].held

    def commit(self, key: str, *, one_phase: bool) -> Work[T]:
        """Begin to commit; return what to make visible, if anything. Then the caller calls ``done`` or ``failed``."""
        self._check_undecided(key)
        if key in self._open and not one_phase:
            raise XaError(XaCode.PROTO, "Cannot do 2 phase commit if the transaction has not been prepared.")
        return self._start(key, _Step.COMMIT)

    def rollback(self, key: str) -> Work[T]:
        """Roll back an open branch at once, or begin to roll back a prepared one; return what is dropped.

        With a place in the result, the branch was prepared: then the caller calls ``done`` or ``failed``.
        """
        self._check_undecided(key)
        if key in self._open:
            return Work(self._open.close(key), None)
        return self._start(key, _Step.ROLLBACK)

    def forget(self, key: str) -> bool:
        """Return whether there is an operator's decision to forget; if so, the caller then calls ``done`` or ``failed``."""
        self._check_idle(key)
        if key in self._open or key in self._prepared or key not in self._heuristic:
            return False
        self._busy[key] = _Step.FORGET
        return True

    def decide(self, key: str, outcome: Outcome) -> Work[T]:
        """Begin an operator's decision on a prepared branch; then the caller calls ``done`` or ``failed``."""
        self._check_undecided(key)
        if key in self._open:
            raise XaError(XaCode.PROTO, f"XA transaction '{key}' has not been prepared; only its client can decide it.")
        self._deciding[key] = outcome
        return self._start(key, _Step.DECIDE)

    def recover(self, qualifier: str | None) -> list[str]:
        """Return the sorted keys of all prepared and heuristic branches, of one resource manager or of all."""
        keys = self._prepared.keys() | self._heuristic.keys()
        return sorted(key for key in keys if not qualifier or qualifier_of(key) == qualifier)

    def expire(self, now_s: float) -> list[str]:
        """Roll back the open branches whose timeout has passed, unless they are busy; return their keys."""
        return self._open.expire(now_s, self._busy)

    # -- second halves ------------------------------------------------------------------------------------------------

    def prepared(self, key: str, place: int) -> None:
        """Note that the messages are parked at ``place``: the branch is prepared."""
        self._end(key, _Step.PREPARE)
        self._open.close(key)
        self._prepared[key] = place

    def refused(self, key: str) -> None:
        """Roll back a branch whose messages could not be parked."""
        self._end(key, _Step.PREPARE)
        self._open.close(key)

    def done(self, key: str) -> None:
        """Complete a commit, a rollback, a decision or a FORGET, which the log now holds."""
        step = self._end(key, _Step.COMMIT, _Step.ROLLBACK, _Step.DECIDE, _Step.FORGET)
        if step is _Step.FORGET:
            del self._heuristic[key]
        elif key in self._open:
            self._open.close(key)
        else:
            del self._prepared[key]
        if step is _Step.DECIDE:
            self._heuristic[key] = self._deciding.pop(key)

    def failed(self, key: str) -> None:
        """Undo a step that could not be stored: an open branch is rolled back, a prepared or heuristic one is as it was."""
        step = self._end(key, _Step.COMMIT, _Step.ROLLBACK, _Step.DECIDE, _Step.FORGET)
        if step is _Step.DECIDE:
            del self._deciding[key]
        if key in self._open:
            self._open.close(key)

    def move(self, key: str, place: int) -> None:
        """Set the new place of a branch whose messages were parked again; one that was decided meanwhile stays decided."""
        if key in self._prepared:
            self._prepared[key] = place

    # -- restoring, mark by mark in the order of the log; a mark may be applied again -----------------------------------

    def restore_prepared(self, key: str, place: int) -> None:
        """Restore a branch that was prepared, or whose messages moved."""
        self._prepared[key] = place

    def restore_decided(self, key: str) -> None:
        """Remove a branch that was committed or rolled back."""
        self._prepared.pop(key, None)

    def restore_heuristic(self, key: str, outcome: Outcome) -> None:
        """Restore an operator's decision on a prepared branch."""
        self._prepared.pop(key, None)
        self._heuristic[key] = outcome

    def restore_forgotten(self, key: str) -> None:
        """Remove an operator's decision that was forgotten."""
        self._heuristic.pop(key, None)

    # -- looking ------------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self._open or self.is_kept(key)

    def is_kept(self, key: str) -> bool:
        """Return whether a branch is prepared or heuristic."""
        return key in self._prepared or key in self._heuristic

    def messages(self, key: str) -> list[T] | None:
        """Return the messages of an open branch; ``None`` when it is not open."""
        return self._open.messages(key) if key in self._open else None

    def place(self, key: str) -> int | None:
        """Return the place of a prepared branch, which may be busy; ``None`` when it is not prepared."""
        return self._prepared.get(key)

    def is_busy(self, key: str) -> bool:
        """Return whether a step of the branch is on its way into the log."""
        return key in self._busy

    def places(self) -> Iterator[tuple[str, int]]:
        """Return the keys and places of prepared branches, the one that has waited longest first."""
        return iter(self._prepared.items())

    def heuristics(self) -> Iterator[tuple[str, Outcome]]:
        """Return operators' decisions that are not forgotten, by key, the oldest first."""
        return iter(self._heuristic.items())

    def counts(self) -> Counts:
        """Return how many branches there are in each state."""
        return Counts(len(self._open), len(self._prepared), len(self._heuristic), self._open.oldest_s)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(self, key: str, step: _Step) -> Work[T]:
        self._busy[key] = step
        place = self._prepared.get(key)
        return Work(self._open.messages(key) if place is None else [], place)

    def _end(self, key: str, *steps: _Step) -> _Step:
        step = self._busy.pop(key)
        assert step in steps, f"branch {key} is being {step.value}"
        return step

    def _check_idle(self, key: str) -> None:
        step = self._busy.get(key)
        if step is not None:
            raise XaError(XaCode.RMFAIL, f"XA transaction '{key}' is being {step.value}; ask again.")

    def _check_undecided(self, key: str, *, bare: bool = False) -> None:
        """Raise ``XaError`` unless the branch is open or prepared, and idle; ``bare`` on a put, as MetaQ's broker answers."""
        self._check_idle(key)
        if key in self._open or key in self._prepared:
            return
        outcome = self._heuristic.get(key)
        if outcome is None:
            raise XaError(XaCode.NOTA, f"XA transaction '{key}' has not been started.", bare=bare)
        code, word = _HEURISTIC[outcome]
        raise XaError(code, f"XA transaction '{key}' has been heuristically {word}.", bare=bare)
