"""Tables of transaction branches: pure state machines over opaque messages (specs: text protocol, section 5).

An XA branch::

    BEGIN ──▶ OPEN ──prepare──▶ PREPARED ──decide──▶ HEURISTIC ──forget──▶ gone
               │                    │
               └──commit, rollback, └──commit, rollback──▶ gone
                  expire──▶ gone

An open branch holds its messages in memory. Of a prepared one only a number is kept, its *place*, by which its owner finds the
messages in the log: one dictionary entry and the text of its key. A heuristic one was decided by an operator; it is remembered
until FORGET. BEGIN opens a new branch of the same name beside it, which hides it until that branch is gone.

A step that the log must remember has two halves, because an append fails or succeeds only later: the command itself, after
which the branch is *busy* and refuses every other command with RMFAIL, and one of ``prepared``, ``refused``, ``done`` and
``failed``.

Keys are canonical texts (``metaq.tx.xid``). Nothing here reads a clock: times come as seconds of any monotonic one.
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
    """Return codes of X/Open XA, by the specification's names without ``XA_`` and ``XAER_``."""

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
    """A transaction command that is refused; the status is 500, the body ``wire``."""

    def __init__(self, code: XaCode, text: str, *, bare: bool = False) -> None:
        """``bare``: clients expect the text alone, as of local transactions and of puts."""
        super().__init__(text)
        self.code = code
        self.bare = bare

    @property
    def wire(self) -> str:
        """``XAException:code=<n>,msg=<text>``, or the text alone; in one line, as clients match no further."""
        text = " ".join(str(self).splitlines())
        return text if self.bare else f"XAException:code={int(self.code)},msg={text}"


class Outcome(enum.StrEnum):
    """What an operator decided about a prepared branch."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    COMPLETE = "complete"
    """Dropped: neither."""


_HEURISTIC: Final = {
    Outcome.COMMIT: (XaCode.HEURCOM, "committed"),
    Outcome.ROLLBACK: (XaCode.HEURRB, "rolled back"),
    Outcome.COMPLETE: (XaCode.HEURHAZ, "completed"),
}


class _Step(enum.Enum):
    """What a busy branch is on its way to."""

    PREPARE = "prepared"
    COMMIT = "committed"
    ROLLBACK = "rolled back"
    DECIDE = "decided by an operator"
    FORGET = "forgotten"


class Work(NamedTuple, Generic[T]):
    """What a branch consists of: of an open one its messages, of a prepared one its place."""

    messages: list[T]
    place: int | None


class Counts(NamedTuple):
    """What a table holds now."""

    open: int
    prepared: int
    heuristic: int
    oldest_open_s: float | None
    """When the oldest open branch began, by the clock of ``begin``."""


# -- open branches ----------------------------------------------------------------------------------------------------


class Room:
    """Limits of branches, and the bytes that all open ones hold, those of several tables together."""

    __slots__ = ("max_branch_bytes", "max_branches", "max_open_transaction_bytes", "max_timeout_s", "open_bytes")

    def __init__(
        self, *, max_branches: int, max_branch_bytes: int, max_open_transaction_bytes: int, max_timeout_s: float
    ) -> None:
        """``max_branches`` of one table, undecided ones included; a timeout beyond ``max_timeout_s`` is cut to it silently."""
        self.max_branches = max_branches
        self.max_branch_bytes = max_branch_bytes
        self.max_open_transaction_bytes = max_open_transaction_bytes
        self.max_timeout_s = max_timeout_s
        self.open_bytes = 0

    def take_limits(self, other: "Room") -> None:
        """Have the limits of another from now on; what is over one of them stays, and nothing is added to it."""
        self.max_branches, self.max_branch_bytes = other.max_branches, other.max_branch_bytes
        self.max_open_transaction_bytes, self.max_timeout_s = other.max_open_transaction_bytes, other.max_timeout_s

    def check_branches(self, count: int) -> None:
        """``XaError`` when there can be no branch more."""
        if count >= self.max_branches:
            raise XaError(
                XaCode.RMERR,
                f"{count} transactions are open or undecided, the limit is {self.max_branches} (max_branches); "
                "decide those that are prepared, or try again later",
            )

    def check_bytes(self, held: int, size: int) -> None:
        """``XaError`` when a branch that holds so many bytes can take no ``size`` more."""
        if held + size > self.max_branch_bytes:
            raise XaError(
                XaCode.RMERR,
                f"{size} bytes more than {held} in one transaction are over the limit of {self.max_branch_bytes} "
                "(max_branch_bytes); the message was not taken, commit what is there or roll it back",
            )
        if self.open_bytes + size > self.max_open_transaction_bytes:
            raise XaError(
                XaCode.RMERR,
                f"{size} bytes more than {self.open_bytes} in all open transactions are over the limit of "
                f"{self.max_open_transaction_bytes} (max_open_transaction_bytes); the message was not taken, try again later",
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
        """Add a message of ``size`` bytes; beyond a limit it is refused and the branch stays."""
        room, held = self._room, self.held + size
        if held > room.max_branch_bytes or room.open_bytes + size > room.max_open_transaction_bytes:
            room.check_bytes(self.held, size)
        self.held = held
        room.open_bytes += size
        self.messages.append(message)


class OpenBranches(Generic[K, T]):
    """Branches whose messages are in memory, and when they expire."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._branches: dict[K, OpenBranch[T]] = {}
        self._deadlines: list[tuple[float, int, K]] = []
        """A heap of (seconds, the branch's number, its key); entries outlive their branches."""
        self._begun = 0

    def __len__(self) -> int:
        return len(self._branches)

    def __contains__(self, key: K) -> bool:
        return key in self._branches

    def begin(self, key: K, now_s: float, timeout_s: float) -> None:
        """Open a branch that is not there."""
        self._begun += 1
        self._branches[key] = OpenBranch(self._room, self._begun, now_s)
        if timeout_s <= 0:
            return
        heappush(self._deadlines, (now_s + min(timeout_s, self._room.max_timeout_s), self._begun, key))
        if len(self._deadlines) > 2 * len(self._branches) + _STALE_KEPT:
            self._forget_stale()

    def _forget_stale(self) -> None:
        """Short transactions would leave an entry each until their deadline: 20,000 a second for a minute are some 150 MB."""
        self._deadlines = sorted(entry for entry in self._deadlines if self._is_current(entry))

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        """Not of an earlier branch of the same name."""
        branch = self._branches.get(entry[2])
        return branch is not None and branch.number == entry[1]

    def __getitem__(self, key: K) -> OpenBranch[T]:
        return self._branches[key]

    def messages(self, key: K) -> list[T]:
        """What a branch holds."""
        return self._branches[key].messages

    def close(self, key: K) -> list[T]:
        """End a branch; what it held."""
        branch = self._branches.pop(key)
        self._room.open_bytes -= branch.held
        return branch.messages

    def expire(self, now_s: float, spared: Container[K]) -> list[K]:
        """End the branches whose time is over and that are not spared; their keys."""
        expired: list[K] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            entry = heappop(self._deadlines)
            key = entry[2]
            # one that is spared is past its vote: it is gone, or needs no deadline any more
            if self._is_current(entry) and key not in spared:
                self.close(key)
                expired.append(key)
        return expired

    @property
    def oldest_s(self) -> float | None:
        """When the oldest branch began."""
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
        """Open a branch that expires after ``timeout_s``, never when it is 0; one that exists is left as it is."""
        self._check_idle(key)
        if key not in self._open and key not in self._prepared:
            self._room.check_branches(len(self._open) + len(self._prepared) + len(self._heuristic))
            self._open.begin(key, now_s, timeout_s)

    def open(self, key: str) -> OpenBranch[T]:
        """An open branch, to be put into before anything else happens; the errors of a put where there is none."""
        if key not in self._open or key in self._busy:
            self._check_undecided(key, bare=True)
            raise XaError(XaCode.PROTO, f"Cannot put into XA transaction '{key}': it has been prepared.")
        return self._open[key]

    def put(self, key: str, message: T, size: int) -> None:
        """Add a message of ``size`` bytes to an open branch; beyond a limit it is refused and the branch stays."""
        self.open(key).put(message, size)

    def prepare(self, key: str) -> list[T]:
        """The messages to be parked; ``prepared`` or ``refused`` follows. None: read only, answer 3, and it is gone."""
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
        """Bytes that an open branch holds."""
        return self._open[key].held

    def commit(self, key: str, *, one_phase: bool) -> Work[T]:
        """What is to be made visible; ``done`` or ``failed`` follows, also when it is nothing."""
        self._check_undecided(key)
        if key in self._open and not one_phase:
            raise XaError(XaCode.PROTO, "Cannot do 2 phase commit if the transaction has not been prepared.")
        return self._start(key, _Step.COMMIT)

    def rollback(self, key: str) -> Work[T]:
        """What is dropped: an open branch at once; of a prepared one (it has a place) ``done`` or ``failed`` follows."""
        self._check_undecided(key)
        if key in self._open:
            return Work(self._open.close(key), None)
        return self._start(key, _Step.ROLLBACK)

    def forget(self, key: str) -> bool:
        """Whether there is an operator's decision to forget, so that ``done`` or ``failed`` follows."""
        self._check_idle(key)
        if key in self._open or key in self._prepared or key not in self._heuristic:
            return False
        self._busy[key] = _Step.FORGET
        return True

    def decide(self, key: str, outcome: Outcome) -> Work[T]:
        """An operator's decision on a prepared branch; ``done`` or ``failed`` follows."""
        self._check_undecided(key)
        if key in self._open:
            raise XaError(XaCode.PROTO, f"XA transaction '{key}' has not been prepared; only its client can decide it.")
        self._deciding[key] = outcome
        return self._start(key, _Step.DECIDE)

    def recover(self, qualifier: str | None) -> list[str]:
        """Sorted keys of everything prepared or heuristic, of one resource manager or of all."""
        keys = self._prepared.keys() | self._heuristic.keys()
        return sorted(key for key in keys if not qualifier or qualifier_of(key) == qualifier)

    def expire(self, now_s: float) -> list[str]:
        """Roll back the open branches whose time is over, unless they are busy; their keys."""
        return self._open.expire(now_s, self._busy)

    # -- second halves ------------------------------------------------------------------------------------------------

    def prepared(self, key: str, place: int) -> None:
        """The messages are parked."""
        self._end(key, _Step.PREPARE)
        self._open.close(key)
        self._prepared[key] = place

    def refused(self, key: str) -> None:
        """The messages could not be parked: the branch is rolled back."""
        self._end(key, _Step.PREPARE)
        self._open.close(key)

    def done(self, key: str) -> None:
        """The log has the commit, the rollback, the decision or that it is forgotten."""
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
        """The log could not take it: what was open is rolled back, what was prepared or heuristic is that again."""
        step = self._end(key, _Step.COMMIT, _Step.ROLLBACK, _Step.DECIDE, _Step.FORGET)
        if step is _Step.DECIDE:
            del self._deciding[key]
        if key in self._open:
            self._open.close(key)

    def move(self, key: str, place: int) -> None:
        """The messages of a prepared branch were parked again elsewhere; one that was decided meanwhile stays decided."""
        if key in self._prepared:
            self._prepared[key] = place

    # -- what the log says, mark by mark in its order; again any number of times ----------------------------------------

    def restore_prepared(self, key: str, place: int) -> None:
        """A branch was prepared, or its messages moved."""
        self._prepared[key] = place

    def restore_decided(self, key: str) -> None:
        """A branch was committed or rolled back."""
        self._prepared.pop(key, None)

    def restore_heuristic(self, key: str, outcome: Outcome) -> None:
        """An operator decided a prepared branch."""
        self._prepared.pop(key, None)
        self._heuristic[key] = outcome

    def restore_forgotten(self, key: str) -> None:
        """The operator's decision is known."""
        self._heuristic.pop(key, None)

    # -- looking ------------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self._open or self.is_kept(key)

    def is_kept(self, key: str) -> bool:
        """Whether a branch is prepared, or was decided by an operator."""
        return key in self._prepared or key in self._heuristic

    def messages(self, key: str) -> list[T] | None:
        """What an open branch holds; ``None`` of one that is not open."""
        return self._open.messages(key) if key in self._open else None

    def place(self, key: str) -> int | None:
        """Where a prepared branch is; it may be busy."""
        return self._prepared.get(key)

    def is_busy(self, key: str) -> bool:
        """Whether an outcome is on its way into the log."""
        return key in self._busy

    def places(self) -> Iterator[tuple[str, int]]:
        """Prepared branches, the one that has waited longest first."""
        return iter(self._prepared.items())

    def heuristics(self) -> Iterator[tuple[str, Outcome]]:
        """Operators' decisions that are not forgotten, the oldest first."""
        return iter(self._heuristic.items())

    def counts(self) -> Counts:
        """How many branches there are in each state."""
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
        """The errors of every command that needs an open or prepared branch; ``bare`` on a put, as the original has it."""
        self._check_idle(key)
        if key in self._open or key in self._prepared:
            return
        outcome = self._heuristic.get(key)
        if outcome is None:
            raise XaError(XaCode.NOTA, f"XA transaction '{key}' has not been started.", bare=bare)
        code, word = _HEURISTIC[outcome]
        raise XaError(code, f"XA transaction '{key}' has been heuristically {word}.", bare=bare)
