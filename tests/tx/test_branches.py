"""The branch tables: every command in every state, limits, deadlines, what the log holds, and the golden answers."""

import random
from collections.abc import Callable
from typing import Final

import pytest

from metaq.errors import MetaqError
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import Put, Transaction
from metaq.protocol.text.replies import write_result
from metaq.tx.branches import Branches, Work
from metaq.tx.local import LocalBranches
from metaq.tx.openbranches import Room
from metaq.tx.states import Decision
from metaq.tx.xacodes import XaCode, XaError
from metaq.tx.xid import LocalKey, parse_key
from tests.protocol.test_golden_vectors import HEX

KEY: Final = "XID:1:0a:0b:app"
OTHER: Final = "XID:1:0a:0c:app"
LOCAL: Final = "TX:S1:1"
PLACE: Final = 4096


def room(**limits: int) -> Room:
    values = {"max_branches": 10, "max_branch_bytes": 100, "max_open_transaction_bytes": 150, "max_timeout_s": 60} | limits
    return Room(**values)


# -- every command in every state ---------------------------------------------------------------------------------------


def to_open(table: Branches[str]) -> None:
    table.begin(KEY, 0, 0)


def to_work(table: Branches[str]) -> None:
    to_open(table)
    table.put(KEY, "m", 1)


def to_prepared(table: Branches[str]) -> None:
    to_work(table)
    table.prepare(KEY)
    table.prepared(KEY, PLACE)


def to_heuristic(outcome: Decision) -> Callable[[Branches[str]], None]:
    def enter(table: Branches[str]) -> None:
        to_prepared(table)
        table.decide(KEY, outcome)
        table.done(KEY)

    return enter


def to_reopened(table: Branches[str]) -> None:
    to_heuristic(Decision.COMMIT)(table)
    table.begin(KEY, 0, 0)


STATES: Final[dict[str, Callable[[Branches[str]], None]]] = {
    "none": lambda table: None,
    "open": to_open,
    "work": to_work,
    "prepared": to_prepared,
    "committed by hand": to_heuristic(Decision.COMMIT),
    "rolled back by hand": to_heuristic(Decision.ROLLBACK),
    "completed by hand": to_heuristic(Decision.COMPLETE),
    "committed by hand, open again": to_reopened,
}

COMMANDS: Final[dict[str, Callable[[Branches[str]], object]]] = {
    "BEGIN": lambda table: table.begin(KEY, 0, 0),
    "put": lambda table: table.put(KEY, "n", 1),
    "PREPARE": lambda table: table.prepare(KEY),
    "COMMIT_TWO_PHASE": lambda table: table.commit(KEY, one_phase=False),
    "COMMIT_ONE_PHASE": lambda table: table.commit(KEY, one_phase=True),
    "ROLLBACK": lambda table: table.rollback(KEY),
    "FORGET": lambda table: table.forget(KEY),
    "decide": lambda table: table.decide(KEY, Decision.COMPLETE),
}

NOTHING: Final[Work[str]] = Work([], None)
WORK: Final = Work(["m"], None)
PARKED: Final[Work[str]] = Work([], PLACE)
NOT_STARTED: Final = f"XA transaction '{KEY}' has not been started."
NOTA: Final = f"XAException:code=-4,msg={NOT_STARTED}"
NOT_PREPARED: Final = (
    "XAException:code=-6,msg=Cannot do 2 phase commit if the transaction has not been prepared.",
    f"XAException:code=-6,msg=XA transaction '{KEY}' has not been prepared; only its client can decide it.",
)
PUT_LATE: Final = f"XAException:code=-6,msg=Cannot put into XA transaction '{KEY}': it has been prepared."
BY_HAND: Final = f"XA transaction '{KEY}' has been heuristically "


def heuristic_row(code: int, word: str) -> list[object]:
    text = f"{BY_HAND}{word}."
    error = f"XAException:code={code},msg={text}"
    return [None, text, error, error, error, error, True, error]


ANSWERS: Final[dict[str, list[object]]] = {
    # one column a command, in the order of COMMANDS; a text is an error
    "none": [None, NOT_STARTED, NOTA, NOTA, NOTA, NOTA, False, NOTA],
    "open": [None, None, [], NOT_PREPARED[0], NOTHING, NOTHING, False, NOT_PREPARED[1]],
    "work": [None, None, ["m"], NOT_PREPARED[0], WORK, WORK, False, NOT_PREPARED[1]],
    "prepared": [None, PUT_LATE, "XAException:code=-6,msg=Cannot call prepare now.", PARKED, PARKED, PARKED, False, PARKED],
    "committed by hand": heuristic_row(7, "committed"),
    "rolled back by hand": heuristic_row(6, "rolled back"),
    "completed by hand": heuristic_row(8, "completed"),
    "committed by hand, open again": [None, None, [], NOT_PREPARED[0], NOTHING, NOTHING, False, NOT_PREPARED[1]],
}


def answer(call: Callable[[], object]) -> object:
    try:
        return call()
    except XaError as error:
        assert error.status == 500
        return error.wire


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_every_state(state: str, command: str) -> None:
    """MQ-071, MQ-072, MQ-075, MQ-076: codes and texts of XA branches (specs: text protocol, 5.3 and 5.6)."""
    table: Branches[str] = Branches(room())
    STATES[state](table)
    before = table.counts()
    got = answer(lambda: COMMANDS[command](table))
    assert got == ANSWERS[state][list(COMMANDS).index(command)]
    if isinstance(got, str) or got is False or (command == "BEGIN" and state in ("open", "work", "prepared")):
        assert table.counts() == before


def state_of(table: Branches[str]) -> str:
    """Where a branch is, found by what it answers; changes it."""
    if (place := table.place(KEY)) is not None:
        assert place == PLACE
        return "prepared"
    got = answer(lambda: table.rollback(KEY))
    return "none" if got == NOTA else str(got)


@pytest.mark.parametrize(
    ("state", "command", "succeeded", "failed"),
    [
        ("work", "COMMIT_ONE_PHASE", "none", "none"),
        ("open", "COMMIT_ONE_PHASE", "none", "none"),
        ("prepared", "COMMIT_ONE_PHASE", "none", "prepared"),
        ("prepared", "COMMIT_TWO_PHASE", "none", "prepared"),
        ("prepared", "ROLLBACK", "none", "prepared"),
        ("prepared", "decide", f"XAException:code=8,msg={BY_HAND}completed.", "prepared"),
        ("committed by hand", "FORGET", "none", f"XAException:code=7,msg={BY_HAND}committed."),
        ("committed by hand, open again", "COMMIT_ONE_PHASE", *[f"XAException:code=7,msg={BY_HAND}committed."] * 2),
    ],
)
def test_both_second_halves(state: str, command: str, succeeded: str, failed: str) -> None:
    """MQ-072, MQ-076: what the log could not take leaves a prepared branch prepared, and rolls an open one back."""
    for end, after in ((Branches[str].done, succeeded), (Branches[str].failed, failed)):
        space = room()
        table: Branches[str] = Branches(space)
        STATES[state](table)
        COMMANDS[command](table)
        end(table, KEY)
        assert state_of(table) == after
        assert space.open_bytes == 0
        with pytest.raises(KeyError):
            end(table, KEY)


def test_the_vote_may_refuse() -> None:
    """MQ-075, MQ-076: a branch that cannot be parked is rolled back."""
    space = room()
    table: Branches[str] = Branches(space)
    to_work(table)
    assert table.prepare(KEY) == ["m"]
    assert space.open_bytes == 1
    table.failed(KEY)
    assert state_of(table) == "none"
    assert space.open_bytes == 0


BUSY: Final[dict[str, tuple[str, str]]] = {
    "prepared": ("work", "PREPARE"),
    "committed": ("work", "COMMIT_ONE_PHASE"),
    "committed ": ("prepared", "COMMIT_TWO_PHASE"),
    "rolled back": ("prepared", "ROLLBACK"),
    "decided by an operator": ("prepared", "decide"),
    "forgotten": ("committed by hand", "FORGET"),
}


@pytest.mark.parametrize("step", BUSY)
def test_a_busy_branch_refuses_every_command(step: str) -> None:
    """MQ-072: while a step is on its way into the log, the answer is XAER_RMFAIL, and says what is going on."""
    state, first = BUSY[step]
    table: Branches[str] = Branches(room())
    STATES[state](table)
    COMMANDS[first](table)
    before = table.counts()
    for command in COMMANDS.values():
        got = answer(lambda command=command: command(table))  # type: ignore[misc]
        assert got == f"XAException:code=-7,msg=XA transaction '{KEY}' is being {step.strip()}; ask again."
    assert table.counts() == before
    assert table.expire(1e9) == []
    on_disk = state != "work"
    assert table.recover(None) == ([KEY] if on_disk else [])
    if first == "PREPARE":
        table.prepared(KEY, PLACE)
    else:
        table.done(KEY)
    assert table.recover(None) == ([KEY] if first in ("PREPARE", "decide") else [])


def test_a_second_half_without_its_first_is_a_fault_of_the_caller() -> None:
    """MQ-072: no second half ends another step than its own."""
    table: Branches[str] = Branches(room())
    to_work(table)
    table.prepare(KEY)
    with pytest.raises(AssertionError, match="is being prepared"):
        table.done(KEY)


# -- codes and the wire -------------------------------------------------------------------------------------------------


def test_the_codes() -> None:
    """MQ-072: the return codes of X/Open XA."""
    assert {code.name: int(code) for code in XaCode} == (
        {"OK": 0, "RDONLY": 3, "HEURRB": 6, "HEURCOM": 7, "HEURHAZ": 8, "RBOTHER": 104, "RBTIMEOUT": 106}
        | {"RMERR": -3, "NOTA": -4, "INVAL": -5, "PROTO": -6, "RMFAIL": -7, "DUPID": -8}
    )


def test_errors_are_one_line() -> None:
    """MQ-072: clients find the code with ``code=(-?\\d+),msg=(.*)``, which ends with the line."""
    error = XaError(XaCode.RBOTHER, "the store\nfailed")
    assert error.wire == "XAException:code=104,msg=the store failed"
    assert XaError(XaCode.NOTA, "text", bare=True).wire == "text"
    assert isinstance(error, MetaqError)


def test_golden_answers() -> None:
    """MQ-075, MQ-076, MQ-108: V17 … V24 and V33 driven through the tables answer with the golden bytes."""
    space = room()
    table: Branches[bytes] = Branches(space)
    local: LocalBranches[bytes] = LocalBranches(space)
    ids = {b"t1": "403090815569625089 0 -1"}

    def run(vector: str) -> bytes:
        replies = b""
        for command in CommandReader(TextLimits()).receive(bytes.fromhex(HEX[vector])):
            assert isinstance(command, Put | Transaction)
            key = command.transaction if isinstance(command, Put) else command.key
            assert key is not None
            status, body = 200, ""
            try:
                body = execute(command, key)
            except XaError as error:
                status, body = error.status, error.wire
            if not (isinstance(command, Transaction) and command.type == "END"):
                replies += write_result(status, body, command.opaque)
        return replies

    def execute(command: Put | Transaction, key: str) -> str:
        if key != "null" and isinstance(parse_key(key), LocalKey):
            if isinstance(command, Put):
                local.put(1, key, command.body, len(command.body))
                return ids[command.body]
            elif command.type == "BEGIN":
                local.begin(1, key, 0, command.timeout_s)
            else:
                assert local.commit(1, key) == [b"t1"]
        elif isinstance(command, Put):
            table.put(key, command.body, len(command.body))
        elif command.type == "BEGIN":
            table.begin(key, 0, command.timeout_s)
        elif command.type == "PREPARE":
            assert table.prepare(key) == [b"x1"]
            table.prepared(key, PLACE)
            return str(int(XaCode.OK))
        elif command.type == "RECOVER":
            return "\r\n".join(table.recover(command.qualifier))
        else:
            assert command.type == "END"
        return ""

    assert run("V17") == bytes.fromhex(HEX["V17r"])
    assert run("V18") == bytes.fromhex(HEX["V18r"])
    assert run("V19") == b"result 200 0 11\r\n"
    assert run("V20") == b"result 200 0 12\r\n"
    assert run("V21") == b"result 200 0 13\r\n"
    assert run("V22") == bytes.fromhex(HEX["V22r"])
    table.restore_prepared("XID:101:0a0b:0c0e:myapp-host1", PLACE)
    table.restore_prepared("XID:101:0a0b:0c0e:another", PLACE)
    assert run("V23") == bytes.fromhex(HEX["V23r"])
    with pytest.raises(XaError) as unknown:
        Branches[str](room()).rollback("XID:100:0a0b:0c0d:myapp-host1")
    assert write_result(500, unknown.value.wire, "17") == bytes.fromhex(HEX["V24"])
    with pytest.raises(XaError) as absent:
        local.put(1, LOCAL, b"", 0)
    assert write_result(500, absent.value.wire, "25") == bytes.fromhex(HEX["V33"])


# -- what is on disk ------------------------------------------------------------------------------------------------------


def test_recover_lists_by_resource_manager() -> None:
    """MQ-072: sorted keys of all that is prepared or decided by an operator, or those of one qualifier, exactly."""
    table: Branches[str] = Branches(room())
    prepared = ["XID:2:0a:0b:app", "XID:1:0a:0b:app2", "XID:1:0a:0b:my-app", "XID:1:0a:0b", "XID:1:0a:aa:app"]
    for key in prepared:
        table.restore_prepared(key, PLACE)
    table.restore_heuristic("XID:1:0a:0d:app", Decision.ROLLBACK)
    table.restore_heuristic("XID:2:0a:0b:app", Decision.COMMIT)
    table.restore_prepared("XID:2:0a:0b:app", PLACE)
    to_work(table)
    everything = sorted({*prepared, "XID:1:0a:0d:app"})
    assert table.recover(None) == table.recover("") == everything
    assert table.recover("app") == ["XID:1:0a:0d:app", "XID:1:0a:aa:app", "XID:2:0a:0b:app"]
    assert table.recover("0b") == table.recover("nobody") == []


def test_an_operators_decision_outlives_a_new_branch_of_its_name() -> None:
    """MQ-072: BEGIN after a heuristic outcome opens a new branch; the outcome is listed until FORGET all the same."""
    table: Branches[str] = Branches(room())
    to_reopened(table)
    assert table.recover(None) == [KEY]
    table.put(KEY, "m", 1)
    assert table.prepare(KEY) == ["m"]
    table.prepared(KEY, PLACE)
    assert table.recover(None) == [KEY]
    assert table.forget(KEY) is False
    assert table.commit(KEY, one_phase=False) == PARKED
    table.done(KEY)
    assert dict(table.heuristics()) == {KEY: Decision.COMMIT}
    assert table.forget(KEY) is True
    table.done(KEY)
    assert table.recover(None) == []


def test_moved_messages() -> None:
    """MQ-076: a prepared branch keeps its turn when its messages move; a decided one does not come back."""
    table: Branches[str] = Branches(room())
    table.restore_prepared(KEY, 1)
    table.restore_prepared(OTHER, 2)
    table.commit(KEY, one_phase=False)
    table.move(KEY, 7)
    table.failed(KEY)
    assert list(table.places()) == [(KEY, 7), (OTHER, 2)]
    table.rollback(KEY)
    table.done(KEY)
    table.move(KEY, 8)
    assert list(table.places()) == [(OTHER, 2)]
    assert table.place(KEY) is None


def test_marks_say_what_is_undecided() -> None:
    """MQ-076, MQ-107: any part of the marks in their order, again from any earlier one on, gives the same table."""
    rng = random.Random(107)

    def draw(place: int) -> Callable[[Branches[str]], None]:
        key, outcome = rng.choice((KEY, OTHER)), rng.choice(list(Decision))
        marks_of_one: list[Callable[[Branches[str]], None]] = [
            lambda table: table.restore_prepared(key, place),
            lambda table: table.restore_decided(key),
            lambda table: table.restore_heuristic(key, outcome),
            lambda table: table.restore_forgotten(key),
        ]
        return rng.choice(marks_of_one)

    marks = [draw(place) for place in range(200)]
    for stop in (50, 125, 200):
        once: Branches[str] = Branches(room())
        again: Branches[str] = Branches(room())
        for mark in marks[:stop]:
            mark(once)
        for mark in (*marks[: stop - 20], *marks[stop // 2 : stop]):
            mark(again)
        assert dict(once.places()) == dict(again.places())
        assert dict(once.heuristics()) == dict(again.heuristics())
