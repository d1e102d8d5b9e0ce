"""The table of an XA branch's states: against the branches that follow it, and against the specification."""

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from metaq.tx.branches import Branches
from metaq.tx.states import STEPS, TABLE, ContentChange, Decision, Event, Refusal, State, Transition
from metaq.tx.xacodes import XaCode, XaError
from tests.tx.test_branches import KEY, PLACE, room

SPECIFICATION: Final = Path(__file__).parents[2] / "docs" / "specs" / "text-protocol.md"
OUTCOMES_OF_STEPS: Final = {Event.STORED, Event.FAILED}
CODES: Final = {
    Refusal.NOTA: XaCode.NOTA,
    Refusal.PROTO: XaCode.PROTO,
    Refusal.HEUR: XaCode.HEURRB,
    Refusal.BUSY: XaCode.RMFAIL,
}
IN_MEMORY: Final = {State.EMPTY, State.OPEN, State.VOTING, State.ENDING}
IN_THE_LOG: Final = {State.PREPARED, State.COMMITTING, State.ROLLING_BACK, State.DECIDING}
PAIRS: Final = sorted(TABLE)


def stored(table: Branches[str]) -> None:
    if table.state(KEY) is State.VOTING:
        table.prepared(KEY, PLACE)
    else:
        table.done(KEY)


EVENTS: Final[dict[Event, Callable[[Branches[str]], object]]] = {
    Event.BEGIN: lambda table: table.begin(KEY, 0, 5),
    Event.PUT: lambda table: table.put(KEY, "m", 1),
    Event.PREPARE: lambda table: table.prepare(KEY),
    Event.COMMIT_TWO_PHASE: lambda table: table.commit(KEY, one_phase=False),
    Event.COMMIT_ONE_PHASE: lambda table: table.commit(KEY, one_phase=True),
    Event.ROLLBACK: lambda table: table.rollback(KEY),
    Event.FORGET: lambda table: table.forget(KEY),
    Event.DECIDE: lambda table: table.decide(KEY, Decision.ROLLBACK),
    Event.TIMEOUT: lambda table: table.expire(5),
    Event.STORED: stored,
    Event.FAILED: lambda table: table.failed(KEY),
}


def after(state: State, event: Event, *, decided: bool) -> State:
    """Return the state that the table names; ``decided`` when there was a decision of the same name before."""
    cell = TABLE[state, event]
    if isinstance(cell, Refusal) or cell.state is None:
        return state
    return State.HEURISTIC if cell.state is State.NONE and cell.action is not ContentChange.ERASE and decided else cell.state


def way_to(goal: State, *, decided: bool) -> list[Event]:
    """Return the shortest way through the table to a state, from no branch, or from one that an operator has decided."""
    ways: deque[tuple[State, list[Event]]] = deque([(State.HEURISTIC if decided else State.NONE, [])])
    seen: set[State] = set()
    while ways:
        state, way = ways.popleft()
        if state is goal:
            return way
        seen.add(state)
        ways += [
            (following, [*way, event])
            for event in Event
            if (state, event) in TABLE and (following := after(state, event, decided=decided)) not in seen
        ]
    raise AssertionError(f"no way to {goal}")


def test_the_table_has_every_pair() -> None:
    """MQ-072: an answer for every command in every state, and an outcome for every step, and for nothing else."""
    expected = {(state, event) for state in State for event in Event if event not in OUTCOMES_OF_STEPS or state in STEPS}
    assert set(TABLE) == expected
    assert {cell.state for cell in TABLE.values() if isinstance(cell, Transition)} == {None, *State}


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_branches_follow_the_table(state: State, event: Event, decided: bool) -> None:
    """MQ-072: every event in every state, also of a branch that hides an operator's decision about an earlier one."""
    space = room()
    table: Branches[str] = Branches(space)
    if decided:
        table.restore_heuristic(KEY, Decision.ROLLBACK)
    for step in way_to(state, decided=decided):
        EVENTS[step](table)
    assert table.state(KEY) is state
    cell = TABLE[state, event]
    if isinstance(cell, Refusal):
        with pytest.raises(XaError) as refused:
            EVENTS[event](table)
        assert refused.value.code is CODES[cell]
    else:
        EVENTS[event](table)
    following = table.state(KEY)
    assert following is after(state, event, decided=decided and state is not State.NONE)
    assert (table.messages(KEY) is not None) == (following in IN_MEMORY)
    assert (table.place(KEY) is not None) == (following in IN_THE_LOG)
    assert (following in (State.HEURISTIC, State.FORGETTING)) <= (KEY in dict(table.heuristics()))
    assert table.is_busy(KEY) == (following in STEPS)
    assert space.open_bytes == len(table.messages(KEY) or [])


def specified() -> dict[tuple[State, Event], str]:
    """Return the cells of the table in section 5.3 that say something; where the original differs, what metaq does."""
    section = SPECIFICATION.read_text("utf-8").split("### 5.3 ")[1].split("\n### ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    assert rows[0] == ["command", "none", "open, no work", "open, work", "prepared", "heuristic"]
    states = (State.NONE, State.EMPTY, State.OPEN, State.PREPARED, State.HEURISTIC)
    return {
        (state, Event(row[0].strip("*"))): cell.split("**metaq:**")[-1].strip()
        for row in rows[2:]
        if row[0] != "END"  # which does nothing
        for state, cell in zip(states, row[1:], strict=True)
        if cell
    }


MEANINGS: Final[list[tuple[str, set[Refusal | ContentChange]]]] = [
    (r"−4|500 not started", {Refusal.NOTA}),
    (r"−6", {Refusal.PROTO}),
    (r"6/7/8|error with the heuristic text", {Refusal.HEUR}),
    (r"opens?\b", {ContentChange.OPEN}),
    (r"200, (removed|commits)|200 body `0`", {ContentChange.STAGE}),
    (r"200 body `3`, branch gone|rolled back", {ContentChange.DROP}),
    (r"200, (nothing|now has work)|stays", {ContentChange.NOTHING}),
    (r"200( ✔)?$", {ContentChange.NOTHING, ContentChange.DROP, ContentChange.STAGE}),
]
"""The beginning of a cell, and what the code's table may have there."""


def test_the_table_is_that_of_the_specification() -> None:
    """MQ-072: section 5.3, cell by cell; it leaves out operators' decisions, and branches that are busy."""
    cells = specified()
    idle = {(state, event) for state, event in TABLE if state not in STEPS and event is not Event.DECIDE}
    assert idle - cells.keys() == {(State.NONE, Event.TIMEOUT)}
    for pair, text in cells.items():
        cell = TABLE[pair]
        meant = next(meaning for pattern, meaning in MEANINGS if re.match(pattern, text))
        assert (cell.action if isinstance(cell, Transition) else cell) in meant, f"{pair}: {text}"
