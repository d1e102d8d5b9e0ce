"""The states of an XA branch, and what each event does in each of them: ``TABLE`` (specs: text protocol, section 5.3).

An open branch has its messages in memory, a prepared one has them in the log, and of one that an operator has decided only the
decision is left, until FORGET. A step that the log must remember has two halves, because an append succeeds or fails only
later: the command brings the branch into one of six *busy* states, and ``stored`` or ``failed`` out of it.
"""

import enum
from typing import Final, NamedTuple

from metaq.tx.xacodes import XaCode, XaError


class Decision(enum.StrEnum):
    """An operator's decision on a prepared branch."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    COMPLETE = "complete"
    """The branch is dropped, as neither committed nor rolled back."""


class State(enum.StrEnum):
    """The state of the branch with a name."""

    NONE = enum.auto()
    EMPTY = enum.auto()
    """Open, without messages."""
    OPEN = enum.auto()
    """Open, with messages."""
    PREPARED = enum.auto()
    HEURISTIC = enum.auto()
    """Decided by an operator. BEGIN opens another branch of the same name, which hides the decision until that one is gone."""
    VOTING = enum.auto()
    """Open, and PREPARE is on its way into the log."""
    ENDING = enum.auto()
    """Open, and its commit in one phase is on its way."""
    COMMITTING = enum.auto()
    ROLLING_BACK = enum.auto()
    DECIDING = enum.auto()
    """These three: prepared, and the decision is on its way."""
    FORGETTING = enum.auto()


class Event(enum.StrEnum):
    """An event in the life of a branch: a command, the end of its time, or the outcome of a step that was on its way."""

    BEGIN = "BEGIN"
    PUT = "put"
    PREPARE = "PREPARE"
    COMMIT_TWO_PHASE = "COMMIT_TWO_PHASE"
    COMMIT_ONE_PHASE = "COMMIT_ONE_PHASE"
    ROLLBACK = "ROLLBACK"
    FORGET = "FORGET"
    DECIDE = "decide"
    """An operator decides."""
    TIMEOUT = "timeout"
    STORED = "stored"
    FAILED = "failed"


class ContentChange(enum.Enum):
    """The change to the content of a branch."""

    NOTHING = enum.auto()
    """At most, the caller adds a message."""
    OPEN = enum.auto()
    """Make room for messages."""
    STAGE = enum.auto()
    """Nothing yet: the caller stages a record."""
    DROP = enum.auto()
    """Remove the messages from memory; if the branch was committed, they are in the log."""
    PARK = enum.auto()
    """The same, and remember their place in the log."""
    RELEASE = enum.auto()
    """Forget the place."""
    RECORD = enum.auto()
    """The same, and remember the operator's decision."""
    ERASE = enum.auto()
    """Forget the decision."""


class Transition(NamedTuple):
    """The effect of an event."""

    action: ContentChange
    state: State | None = None
    """The state afterwards; ``None`` when it stays as it is. ``NONE`` uncovers a hidden decision: then it is ``HEURISTIC``."""


class Refusal(enum.Enum):
    """The reason why an event changes nothing, and is answered with an error."""

    NOTA = enum.auto()
    PROTO = enum.auto()
    HEUR = enum.auto()
    """One of HEURCOM, HEURRB, HEURHAZ."""
    BUSY = enum.auto()
    """RMFAIL: another step is on its way."""


_STAYS: Final = Transition(ContentChange.NOTHING)
_OPENS: Final = Transition(ContentChange.OPEN, State.EMPTY)
_TAKES: Final = Transition(ContentChange.NOTHING, State.OPEN)
_VOTES: Final = Transition(ContentChange.STAGE, State.VOTING)
_ENDS: Final = Transition(ContentChange.STAGE, State.ENDING)
_COMMITS: Final = Transition(ContentChange.STAGE, State.COMMITTING)
_RETURNS: Final = Transition(ContentChange.STAGE, State.ROLLING_BACK)
_DECIDES: Final = Transition(ContentChange.STAGE, State.DECIDING)
_FORGETS: Final = Transition(ContentChange.STAGE, State.FORGETTING)
_GONE: Final = Transition(ContentChange.DROP, State.NONE)
_PARKED: Final = Transition(ContentChange.PARK, State.PREPARED)
_FREE: Final = Transition(ContentChange.RELEASE, State.NONE)
_DECIDED: Final = Transition(ContentChange.RECORD, State.HEURISTIC)
_ERASED: Final = Transition(ContentChange.ERASE, State.NONE)
_KEPT: Final = Transition(ContentChange.NOTHING, State.PREPARED)
_STANDS: Final = Transition(ContentChange.NOTHING, State.HEURISTIC)
_NOTA, _PROTO, _HEUR, _BUSY = Refusal

# fmt: off
_ROWS: Final[dict[State, tuple[Transition | Refusal, ...]]] = {
    #                   BEGIN   put     PREPARE COMMIT_2PH COMMIT_1PH ROLLBACK  FORGET    decide    timeout stored    failed
    State.NONE:        (_OPENS, _NOTA,  _NOTA,  _NOTA,     _NOTA,     _NOTA,    _STAYS,   _NOTA,    _STAYS),
    State.EMPTY:       (_STAYS, _TAKES, _GONE,  _PROTO,    _ENDS,     _GONE,    _STAYS,   _PROTO,   _GONE),
    State.OPEN:        (_STAYS, _TAKES, _VOTES, _PROTO,    _ENDS,     _GONE,    _STAYS,   _PROTO,   _GONE),
    State.PREPARED:    (_STAYS, _PROTO, _PROTO, _COMMITS,  _COMMITS,  _RETURNS, _STAYS,   _DECIDES, _STAYS),
    State.HEURISTIC:   (_OPENS, _HEUR,  _HEUR,  _HEUR,     _HEUR,     _HEUR,    _FORGETS, _HEUR,    _STAYS),
    State.VOTING:      (_BUSY,  _BUSY,  _BUSY,  _BUSY,     _BUSY,     _BUSY,    _BUSY,    _BUSY,    _STAYS, _PARKED,  _GONE),
    State.ENDING:      (_BUSY,  _BUSY,  _BUSY,  _BUSY,     _BUSY,     _BUSY,    _BUSY,    _BUSY,    _STAYS, _GONE,    _GONE),
    State.COMMITTING:  (_BUSY,  _BUSY,  _BUSY,  _BUSY,     _BUSY,     _BUSY,    _BUSY,    _BUSY,    _STAYS, _FREE,    _KEPT),
    State.ROLLING_BACK:(_BUSY,  _BUSY,  _BUSY,  _BUSY,     _BUSY,     _BUSY,    _BUSY,    _BUSY,    _STAYS, _FREE,    _KEPT),
    State.DECIDING:    (_BUSY,  _BUSY,  _BUSY,  _BUSY,     _BUSY,     _BUSY,    _BUSY,    _BUSY,    _STAYS, _DECIDED, _KEPT),
    State.FORGETTING:  (_BUSY,  _BUSY,  _BUSY,  _BUSY,     _BUSY,     _BUSY,    _BUSY,    _BUSY,    _STAYS, _ERASED,  _STANDS),
}
# fmt: on
TABLE: Final = {(state, event): cell for state, row in _ROWS.items() for event, cell in zip(Event, row, strict=False)}
"""The effect of each event in each state. Only busy branches have an outcome to come: the other pairs are callers' faults."""

STEPS: Final = {
    State.VOTING: "prepared",
    State.ENDING: "committed",
    State.COMMITTING: "committed",
    State.ROLLING_BACK: "rolled back",
    State.DECIDING: "decided by an operator",
    State.FORGETTING: "forgotten",
}
"""The busy states, and what is being done to the branch."""
_TOO_EARLY_OR_LATE: Final = {
    Event.PUT: "Cannot put into XA transaction '{}': it has been prepared.",
    Event.PREPARE: "Cannot call prepare now.",
    Event.COMMIT_TWO_PHASE: "Cannot do 2 phase commit if the transaction has not been prepared.",
    Event.DECIDE: "XA transaction '{}' has not been prepared; only its client can decide it.",
}
_HEURISTIC: Final = {
    Decision.COMMIT: (XaCode.HEURCOM, "committed"),
    Decision.ROLLBACK: (XaCode.HEURRB, "rolled back"),
    Decision.COMPLETE: (XaCode.HEURHAZ, "completed"),
}


def refused(refusal: Refusal, state: State, event: Event, key: str, outcome: Decision | None) -> XaError:
    """Return the error that answers a refused command; ``outcome`` is the operator's decision, if there is one."""
    if refusal is Refusal.BUSY:
        return XaError(XaCode.RMFAIL, f"XA transaction '{key}' is being {STEPS[state]}; ask again.")
    if refusal is Refusal.PROTO:
        return XaError(XaCode.PROTO, _TOO_EARLY_OR_LATE[event].format(key))
    bare = event is Event.PUT  # as MetaQ's broker answers
    if refusal is Refusal.NOTA:
        return XaError(XaCode.NOTA, f"XA transaction '{key}' has not been started.", bare=bare)
    assert outcome is not None
    code, word = _HEURISTIC[outcome]
    return XaError(code, f"XA transaction '{key}' has been heuristically {word}.", bare=bare)
