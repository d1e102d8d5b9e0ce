"""The answer to every command of a text transaction in every state; a refused command changes nothing."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.text.replies import BAD_REQUEST, ERROR, OK
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import write_document
from tests.support.broker import BrokerProcess, wait_until
from tests.support.slowdisk import Controlled
from tests.support.talk import Talk

TOPIC: Final = "orders"
DEADLINE_S: Final = 60.0
HEURISTIC: Final = ("commit", "rollback", "complete")
KEPT: Final = 16
"""Branches that an operator decided in each way, so that every test has its own."""
COMMANDS: Final = ("BEGIN", "put", "PREPARE", "COMMIT_TWO_PHASE", "COMMIT_ONE_PHASE", "ROLLBACK", "FORGET")
DONE: Final = (OK, "")
NONE: Final = (ERROR, "XAException:code=-4,msg=XA transaction '{key}' has not been started.")
NONE_BARE: Final = (ERROR, "XA transaction '{key}' has not been started.")
UNPREPARED: Final = (ERROR, "XAException:code=-6,msg=Cannot do 2 phase commit if the transaction has not been prepared.")
PREPARED: Final = (ERROR, "XAException:code=-6,msg=Cannot call prepare now.")
CLOSED: Final = (ERROR, "XAException:code=-6,msg=Cannot put into XA transaction '{key}': it has been prepared.")
PUT: Final = (OK, "{id} 0 -1")


def decided(code: int, word: str) -> dict[str, tuple[int, str]]:
    text = f"XA transaction '{{key}}' has been heuristically {word}."
    refusal = (ERROR, f"XAException:code={code},msg={text}")
    steps = ("PREPARE", "COMMIT_TWO_PHASE", "COMMIT_ONE_PHASE", "ROLLBACK")
    return {"BEGIN": DONE, "put": (ERROR, text), **dict.fromkeys(steps, refusal), "FORGET": DONE}


OPEN: Final = {
    "BEGIN": DONE,
    "put": PUT,
    "PREPARE": (OK, "0"),
    "COMMIT_TWO_PHASE": UNPREPARED,
    "COMMIT_ONE_PHASE": DONE,
    "ROLLBACK": DONE,
    "FORGET": DONE,
}
XA: Final = {
    "none": {
        "BEGIN": DONE,
        "put": NONE_BARE,
        "PREPARE": NONE,
        "COMMIT_TWO_PHASE": NONE,
        "COMMIT_ONE_PHASE": NONE,
        "ROLLBACK": NONE,
        "FORGET": DONE,
    },
    "open, no work": {**OPEN, "PREPARE": (OK, "3")},
    "open, work": OPEN,
    "prepared": {
        "BEGIN": DONE,
        "put": CLOSED,
        "PREPARE": PREPARED,
        "COMMIT_TWO_PHASE": DONE,
        "COMMIT_ONE_PHASE": DONE,
        "ROLLBACK": DONE,
        "FORGET": DONE,
    },
    "commit": decided(7, "committed"),
    "rollback": decided(6, "rolled back"),
    "complete": decided(8, "completed"),
}
NO_LOCAL: Final = (ERROR, "Local transaction '{key}' has not been started.")
NOT_XA: Final = (ERROR, "XAException:code=-4,msg={key} is not a valid xid")
LOCAL: Final = {
    "none": {
        "BEGIN": DONE,
        "put": NO_LOCAL,
        "PREPARE": NO_LOCAL,
        "COMMIT_TWO_PHASE": NO_LOCAL,
        "COMMIT_ONE_PHASE": NO_LOCAL,
        "ROLLBACK": NO_LOCAL,
        "FORGET": NOT_XA,
    },
    "open": {
        "BEGIN": DONE,
        "put": PUT,
        "COMMIT_TWO_PHASE": DONE,
        "COMMIT_ONE_PHASE": DONE,
        "ROLLBACK": DONE,
        "PREPARE": (ERROR, "XAException:code=-3,msg=Prepare not implemented on Local Transactions."),
        "FORGET": NOT_XA,
    },
}
_numbers = count(1)


def heuristic_key(outcome: str, number: int) -> str:
    return f"XID:7:{HEURISTIC.index(outcome):02x}:{number:02x}:m"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data = tmp_path_factory.mktemp("broker") / "data"
    (data / "config").mkdir(parents=True)
    kept = [[heuristic_key(outcome, number), outcome] for outcome in HEURISTIC for number in range(KEPT)]
    content = {"next": 0, "ids": 0, "prepared": [], "heuristic": kept}
    write_document(RealDisk(), data / "config" / "transactions.json", content)
    with BrokerProcess(data) as process:
        yield process


@pytest.fixture
def talk(broker: BrokerProcess) -> Iterator[Talk]:
    with Talk(broker) as talk:
        yield talk


def in_state(talk: Talk, state: str, command: str) -> str:
    """The key of a new branch that is in a state."""
    if state in HEURISTIC:
        return heuristic_key(state, COMMANDS.index(command))
    key = f"XID:5:{next(_numbers):08x}::m"
    if state != "none":
        talk.done(key, "BEGIN")
    if state in ("open, work", "prepared"):
        talk.placed(TOPIC, b"x", key)
    if state == "prepared":
        assert talk.transaction(key, "PREPARE") == (OK, "0")
    return key


def state_of(talk: Talk, key: str) -> str:
    """Which state a branch is in, found out at the cost of the branch."""
    listed = key in talk.recover("m")
    code, text = talk.transaction(key, "COMMIT_TWO_PHASE")
    if not listed:
        return "none" if "has not been started" in text else "open"
    return "prepared" if code == OK else {"code=7": "commit", "code=6": "rollback", "code=8": "complete"}[text[12:18]]


def after(state: str, command: str) -> str:
    """Return the state of a branch after a command, by section 5.3."""
    general = state.partition(",")[0]
    match command:
        case "BEGIN" if state == "none":
            return "open"
        case "PREPARE" if state == "open, no work":
            return "none"
        case "PREPARE" if state == "open, work":
            return "prepared"
        case "COMMIT_ONE_PHASE" | "ROLLBACK" if general in ("open", "prepared"):
            return "none"
        case "COMMIT_TWO_PHASE" if state == "prepared":
            return "none"
        case "FORGET" if state in HEURISTIC:
            return "none"
    return general


def say(talk: Talk, key: str, command: str) -> tuple[int, str]:
    return talk.put(TOPIC, b"y", key) if command == "put" else talk.transaction(key, command)


def agrees(expected: tuple[int, str], answer: tuple[int, str], key: str) -> bool:
    if expected is PUT:
        message_id, rest = answer[1].split(" ", 1)
        return answer[0] == OK and int(message_id) < 0 and rest == "0 -1"
    return answer == (expected[0], expected[1].format(key=key))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", XA)
def test_xa_commands_in_every_state(talk: Talk, state: str, command: str) -> None:
    """MQ-072, MQ-075, MQ-076, MQ-107: section 5.3: the answer byte for byte, and the state that follows."""
    key = in_state(talk, state, command)
    answer = say(talk, key, command)
    assert agrees(XA[state][command], answer, key), answer
    expected = after(state, command)
    if state in HEURISTIC and command == "BEGIN":  # a new branch of the same name hides the decision until it ends
        talk.done(key, "ROLLBACK")
    assert state_of(talk, key) == expected


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("state", LOCAL)
def test_local_commands_in_every_state(talk: Talk, state: str, command: str) -> None:
    """MQ-072, MQ-108: section 5.2: the answer byte for byte; what is refused ends nothing."""
    key = f"TX:{next(_numbers)}:-3"
    if state == "open":
        talk.done(key, "BEGIN")
    answer = say(talk, key, command)
    assert agrees(LOCAL[state][command], answer, key), answer
    ended = command in ("COMMIT_ONE_PHASE", "COMMIT_TWO_PHASE", "ROLLBACK")
    still_open = (state == "open" and not ended) or command == "BEGIN"
    assert (talk.transaction(key, "ROLLBACK")[0] == OK) is still_open


@pytest.mark.parametrize("state", [*XA, "local"])
def test_end_is_never_answered(talk: Talk, state: str) -> None:
    """MQ-072: nor is it an error, whatever there is; the next answer is that of the next command."""
    key = f"TX:{next(_numbers)}:1" if state == "local" else in_state(talk, state, "put")
    talk.send(talk.step(key, "END") + talk.step("null", "END") + talk.step("garbage", "END"))
    assert talk.transaction("null", "RECOVER", "nobody") == DONE


def test_a_key_is_needed(talk: Talk) -> None:
    """MQ-072: RECOVER alone has none; without one the others are told −5, with a word that is none 400."""
    for command in ("BEGIN", "PREPARE", "COMMIT_TWO_PHASE", "COMMIT_ONE_PHASE", "ROLLBACK", "FORGET"):
        refusal = f"XAException:code=-5,msg={command} needs the key of a transaction"
        assert talk.transaction("null", command) == (ERROR, refusal)
        code, text = talk.transaction("XID:1:0x:0a:m", command)
        assert (code, text) == (BAD_REQUEST, "gtrid '0x' is not hexadecimal")
    code, text = talk.put(TOPIC, b"x", "null")
    assert code == BAD_REQUEST
    assert text.startswith("transaction key 'null' is neither XID:")


@pytest.mark.parametrize("key", ["XID:1:0A0B:0C:m", "XID:1:0a0B:0c:m", "XID:+1:0a0b:0c:m", "XID:1:0a0bf:0c:m"])
def test_spellings_of_one_branch(talk: Talk, key: str) -> None:
    """MQ-072: upper case, a sign and half a byte at the end make no other branch; lists have the plain form."""
    canonical = "XID:1:0a0b:0c:m"
    talk.done(key, "BEGIN")
    talk.placed(TOPIC, b"x", canonical)
    assert talk.transaction(key, "PREPARE") == (OK, "0")
    assert canonical in talk.recover("m")
    talk.done(key, "ROLLBACK")
    assert talk.transaction(key, "ROLLBACK") == (ERROR, NONE[1].format(key=canonical))


def test_keys_of_four_parts(talk: Talk) -> None:
    """MQ-072: clients before 1.4.5 have no qualifier; such a key comes back as it was sent, and in lists of all only."""
    key = "XID:9:0a::"[:-1]
    talk.done(key, "BEGIN")
    talk.placed(TOPIC, b"x", key)
    talk.done(key, "PREPARE")
    assert key in talk.recover()
    assert key not in talk.recover("m")
    talk.done(key, "COMMIT_TWO_PHASE")
    assert talk.transaction(key, "ROLLBACK") == (ERROR, NONE[1].format(key=key))


def test_recover_lists_by_qualifier(talk: Talk) -> None:
    """MQ-072, MQ-107: prepared and heuristic branches, sorted, of one resource manager or of all; a number is a timeout."""
    keys = [f"XID:6:{number:02x}:01:{name}" for name in ("left", "right") for number in (2, 1)]
    for key in keys:
        talk.done(key, "BEGIN")
        talk.placed(TOPIC, b"x", key)
        talk.done(key, "PREPARE")
    opened = "XID:6:03:01:left"
    talk.done(opened, "BEGIN")
    talk.placed(TOPIC, b"x", opened)
    left, right = sorted(keys[:2]), sorted(keys[2:])
    assert talk.recover("left") == left
    assert talk.recover("right") == right
    assert talk.recover("lef") == []
    everything = talk.recover()
    assert everything == sorted(everything)
    assert set(everything) >= {*left, *right}
    assert any(key.startswith("XID:7:") for key in everything)
    assert talk.recover("60") == everything
    for key in (*keys, opened):
        talk.done(key, "ROLLBACK")
    assert talk.recover("left") == talk.recover("right") == []


def test_a_branch_whose_step_waits_for_the_disk(tmp_path: Path) -> None:
    """MQ-072: until the vote is on the disk another connection is told −7; on the own one the next step waits for it."""
    key = "XID:1:01:01:m"
    with Controlled(tmp_path / "data") as broker, Talk(broker) as own, Talk(broker) as other:
        own.done(key, "BEGIN")
        own.placed(TOPIC, b"x", key)
        broker.stall()
        own.send(own.step(key, "PREPARE") + own.step(key, "COMMIT_TWO_PHASE") + own.step(key, "COMMIT_TWO_PHASE"))
        busy = f"XAException:code=-7,msg=XA transaction '{key}' is being prepared; ask again."
        wait_until(lambda: other.transaction(key, "BEGIN") == (ERROR, busy), DEADLINE_S, "the vote arrives")
        for command in ("BEGIN", "PREPARE", "COMMIT_TWO_PHASE", "COMMIT_ONE_PHASE", "ROLLBACK", "FORGET"):
            assert other.transaction(key, command) == (ERROR, busy)
        assert other.put(TOPIC, b"y", key)[1].endswith("is being prepared; ask again.")
        assert other.recover() == []
        broker.go_on()
        answers = [reply.body.decode() for reply in own.replies(3)]
        assert answers == ["0", "", NONE[1].format(key=key)]
        assert other.bodies(TOPIC) == [b"x"]


def test_a_put_with_an_empty_key(talk: Talk) -> None:
    """MQ-059: two blanks where the key belongs are refused like any other key that is none; the connection goes on."""
    code, text = talk.put(TOPIC, b"x", "")
    assert code == BAD_REQUEST
    assert "transaction key ''" in text
    assert talk.recover("nobody") == []
