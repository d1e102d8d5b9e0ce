"""XA sessions: the bytes they send, their handling of answers and of no answer, and several brokers."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from typing import Final

import pytest

from metaq.client.xa import OutcomeUnknown, Resolved, XaFailed, connect, default_qualifier, resolve
from metaq.errors import BadRequest, ClientError, ConnectionFailed, Refused
from metaq.protocol.text.commands import NO_OPAQUE, Command, Put, Stats, Transaction
from metaq.protocol.text.replies import write_result
from metaq.tx.xacodes import XaCode
from metaq.tx.xid import Xid
from tests.protocol.test_golden_vectors import HEX
from tests.support.fakebroker import FakeBroker, opaque

QUALIFIER: Final = "myapp-host1"
SESSION: Final = b"10.0.0.9-1400000000000-2"
XID: Final = Xid(100, b"\x0a\x0b", b"\x0c\x0d", QUALIFIER)
LONG_S: Final = 60.0
CONFIG: Final = "[system]\nnumPartitions=1\n\n[topic=orders]\nnumPartitions=3\nacceptPublish=true\n"


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


# -- bytes ------------------------------------------------------------------------------------------------------------


class Script:
    """A broker that expects exactly these bytes, in this order, and answers each as told."""

    def __init__(self, *exchanges: tuple[bytes, bytes]) -> None:
        self._exchanges = exchanges
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._play)
        self.port = self._listener.getsockname()[1]
        self.received: list[bytes] = []

    def __enter__(self) -> "Script":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._thread.join()

    def _play(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.settimeout(LONG_S)
            for expected, answer in self._exchanges:
                data = b""
                while len(data) < len(expected) and (more := connection.recv(len(expected) - len(data))):
                    data += more
                self.received.append(data)
                if data != expected:
                    return
                connection.sendall(answer)
            connection.recv(1)


def vector(name: str, number: int) -> bytes:
    """A golden vector with this connection's number as the opaque of its last line."""
    data = bytes.fromhex(HEX[name])
    head, _, body = data.rpartition(b"\r\n") if name == "V21" else (data.removesuffix(b"\r\n"), b"", b"")
    return head.rpartition(b" ")[0] + b" %d\r\n" % number + body


def answer(name: str, number: int) -> bytes:
    line, body = bytes.fromhex(HEX[name]).split(b"\r\n", 1)
    return line.rpartition(b" ")[0] + b" %d\r\n" % number + body


def test_golden_bytes() -> None:
    """MQ-059, MQ-075, MQ-076: V20 to V24, END and PREPARE in one write."""
    prepare = re.sub(rb" 14\r\n", f" {NO_OPAQUE}\r\n".encode(), vector("V22", 2))
    exchanges = [
        (vector("V20", 0), b"result 200 0 0\r\n"),
        (vector("V21", 1), b"result 200 7 1\r\n-7 1 -1"),
        (prepare, answer("V22r", 2)),
        (b"transaction %b %b COMMIT_TWO_PHASE myapp-host1 3\r\n" % (str(XID).encode(), SESSION), b"result 200 0 3\r\n"),
        (vector("V23", 4), answer("V23r", 4)),
        (b"transaction %b %b ROLLBACK myapp-host1 5\r\n" % (str(XID).encode(), SESSION), answer("V24", 5)),
    ]
    with Script(*exchanges) as broker, connect(f"127.0.0.1:{broker.port}", qualifier=QUALIFIER, branch_timeout_s=20) as session:
        session._commands._id = SESSION.decode()
        session.tpc_begin(session.xid(100, b"\x0a\x0b", b"\x0c\x0d"))
        assert session.send("meta-test", b"x1", partition=1) == -7
        session.tpc_prepare()
        session.tpc_commit()
        assert session.tpc_recover() == [XID, XID._replace(format_id=101, bqual=b"\x0c\x0e")]
        with pytest.raises(XaFailed, match=r"NOTA \(-4\): XA transaction 'XID:100:.*' has not been started") as failure:
            session.tpc_rollback(XID)
        assert (failure.value.code, failure.value.xid) == (XaCode.NOTA, XID)
    assert broker.received == [expected for expected, _ in exchanges]


# -- a broker of its own ----------------------------------------------------------------------------------------------


class Resource:
    """Answers the commands of branches, each kind in turn with what a test wants; 200 where it wants nothing."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[tuple[int, str] | None]] = {}
        self.steps: list[str] = []
        self.puts: list[Put] = []
        self.begins: list[Transaction] = []

    def answer(self, commands: list[Command]) -> bytes | None:
        data = b""
        for command in commands:
            reply = self._one(command)
            if reply is None:
                return None
            data += reply
        return data

    def _one(self, command: Command) -> bytes | None:
        if isinstance(command, Stats):
            return write_result(200, CONFIG, command.opaque)
        if isinstance(command, Put):
            self.puts.append(command)
        kind = command.type if isinstance(command, Transaction) else "PUT"
        if isinstance(command, Transaction):
            self.steps.append(kind)
            if kind == "BEGIN":
                self.begins.append(command)
            if kind == "END":
                return b""
        usual = {"PUT": f"{-len(self.puts)} 0 -1", "PREPARE": "0"}
        wanted = self.wanted.get(kind, [])
        reply = wanted.pop(0) if wanted else (200, usual.get(kind, ""))
        return None if reply is None else write_result(*reply, opaque(command))


class Setup:
    """Brokers, and a session with all of them."""

    def __init__(self, stack: contextlib.ExitStack, count: int = 1) -> None:
        self.resources = [Resource() for _ in range(count)]
        self.brokers = [stack.enter_context(FakeBroker(resource.answer)) for resource in self.resources]
        self.places = [f"127.0.0.1:{broker.port}" for broker in self.brokers]
        self.session = stack.enter_context(connect(";".join(self.places), qualifier=QUALIFIER, timeout_s=LONG_S))

    @property
    def resource(self) -> Resource:
        return self.resources[0]

    def prepared(self, body: bytes = b"x") -> Xid:
        xid = self.session.xid(1, body, b"")
        self.session.tpc_begin(xid)
        self.session.send("orders", body)
        self.session.tpc_prepare()
        return xid


def xa_error(code: int, text: str = "no") -> tuple[int, str]:
    return 500, f"XAException:code={code},msg={text}"


def test_the_life_of_a_branch(stack: contextlib.ExitStack) -> None:
    """MQ-075, MQ-076: begin, messages, and one phase or two; a session goes from branch to branch."""
    setup = Setup(stack)
    session, resource = setup.session, setup.resource
    assert session.branch is None
    session.tpc_begin(session.xid(1, "one", "b"))
    session.send("orders", b"x", tag="A", partition=2)
    assert session.branch == Xid(1, b"one", b"b", QUALIFIER)
    session.tpc_commit()
    setup.prepared()
    session.tpc_commit()
    setup.prepared()
    session.tpc_rollback()
    session.tpc_begin(session.xid(1, "four", ""))
    session.tpc_rollback()
    two_phases = ["BEGIN", "END", "PREPARE"]
    last = ["BEGIN", "ROLLBACK"]
    assert resource.steps == [
        "BEGIN", "COMMIT_ONE_PHASE", *two_phases, "COMMIT_TWO_PHASE", *two_phases, "ROLLBACK", *last,
    ]  # fmt: skip
    assert (resource.puts[0].transaction, resource.puts[0].flag, resource.puts[0].body) == (
        "XID:1:6f6e65:62:myapp-host1",
        1,
        b"\0\0\0\1Ax",
    )
    assert [begin.timeout_s for begin in resource.begins] == [60] * 4


def test_partitions_take_turns(stack: contextlib.ExitStack) -> None:
    """MQ-075: a put in a transaction names a real partition, of as many as the broker says the topic has."""
    setup = Setup(stack)
    setup.session.tpc_begin(setup.session.xid(1, "g", "b"))
    for _ in range(6):
        setup.session.send("orders", b"")
    setup.session.send("not-there-yet", b"")
    chosen = [put.partition for put in setup.resource.puts]
    assert sorted(chosen[:3]) == [0, 1, 2]
    assert chosen[3:] == [*chosen[:3], 0]


def test_a_branch_without_messages_is_over_with_the_vote(stack: contextlib.ExitStack) -> None:
    """MQ-076: XA_RDONLY."""
    setup = Setup(stack)
    for end in (setup.session.tpc_commit, setup.session.tpc_rollback, setup.session.leave):
        setup.resource.wanted["PREPARE"] = [(200, "3")]
        setup.session.tpc_begin(setup.session.xid(1, "g", "b"))
        setup.session.tpc_prepare()
        end()
        assert setup.session.branch is None
    assert setup.resource.steps == ["BEGIN", "END", "PREPARE"] * 3


def test_a_refused_vote_is_followed_by_a_rollback(stack: contextlib.ExitStack) -> None:
    """MQ-076: which a broker that knows the branch no more confirms in its way."""
    setup = Setup(stack)
    setup.resource.wanted = {"PREPARE": [xa_error(106, "timed out")], "ROLLBACK": [xa_error(-4)]}
    with pytest.raises(XaFailed, match=r"RBTIMEOUT \(106\): timed out"):
        setup.prepared()
    setup.session.tpc_rollback()
    assert setup.session.branch is None


@pytest.mark.parametrize("code", [7, 4711])
def test_codes(stack: contextlib.ExitStack, code: int) -> None:
    """MQ-076: a code that XA does not know is told as it is; a text of several lines, too."""
    setup = Setup(stack)
    setup.resource.wanted["COMMIT_TWO_PHASE"] = [xa_error(code, "first\nsecond")]
    setup.prepared()
    with pytest.raises(XaFailed, match=r"HEURCOM|a code of its own") as failure:
        setup.session.tpc_commit()
    assert (failure.value.code, failure.value.text) == (code, "first\nsecond")


def test_a_refused_message_leaves_the_branch_open(stack: contextlib.ExitStack) -> None:
    """MQ-075: the branch goes on without it."""
    setup = Setup(stack)
    setup.resource.wanted["PUT"] = [(400, "too large")]
    setup.session.tpc_begin(setup.session.xid(1, "g", "b"))
    with pytest.raises(Refused, match="refused: too large"):
        setup.session.send("orders", b"large")
    setup.session.send("orders", b"small")
    setup.session.tpc_commit()
    assert setup.resource.steps == ["BEGIN", "COMMIT_ONE_PHASE"]


# -- no answer --------------------------------------------------------------------------------------------------------


def test_a_message_without_answer_can_only_be_rolled_back(stack: contextlib.ExitStack) -> None:
    """MQ-076: all messages of a branch or none: never those that may have arrived."""
    setup = Setup(stack)
    setup.resource.wanted["PUT"] = [None]
    setup.session.tpc_begin(setup.session.xid(1, "g", "b"))
    with pytest.raises(ConnectionFailed):
        setup.session.send("orders", b"x")
    for forbidden in (setup.session.tpc_prepare, setup.session.tpc_commit):
        with pytest.raises(ClientError, match="may be missing"):
            forbidden()
    setup.session.tpc_rollback()
    assert setup.resource.steps == ["BEGIN", "ROLLBACK"]


def test_a_begin_without_answer_can_be_rolled_back_at_its_broker(stack: contextlib.ExitStack) -> None:
    """MQ-076: the session is in no branch, and knows which broker may have begun it."""
    setup = Setup(stack, count=2)
    for resource in setup.resources:
        resource.wanted["BEGIN"] = [None]
    xid = setup.session.xid(1, "g", "b")
    with pytest.raises(OutcomeUnknown, match=r"BEGIN of .*; tpc_rollback\(xid\) ends it, or answers NOTA"):
        setup.session.tpc_begin(xid)
    assert setup.session.branch is None
    setup.session.tpc_rollback(xid)
    used = [resource for resource in setup.resources if resource.steps]
    assert [resource.steps for resource in used] == [["BEGIN", "ROLLBACK"]]


def test_a_begin_without_answer_keeps_its_broker_until_its_rollback_is_answered(stack: contextlib.ExitStack) -> None:
    """MQ-076: also after tpc_recover, which lists prepared branches only."""
    setup = Setup(stack, count=2)
    for resource in setup.resources:
        resource.wanted = {"BEGIN": [None], "ROLLBACK": [None, xa_error(XaCode.NOTA)]}
    xid = setup.session.xid(1, "g", "b")
    with pytest.raises(OutcomeUnknown):
        setup.session.tpc_begin(xid)
    assert setup.session.tpc_recover() == []
    with pytest.raises(OutcomeUnknown, match=r"ROLLBACK of .*; tpc_rollback\(xid\) can be called again, and answers NOTA"):
        setup.session.tpc_rollback(xid)
    with pytest.raises(XaFailed, match="NOTA"):
        setup.session.tpc_rollback(xid)
    used = [resource for resource in setup.resources if "BEGIN" in resource.steps]
    assert [resource.steps for resource in used] == [["BEGIN", "RECOVER", "ROLLBACK", "ROLLBACK"]]
    with pytest.raises(ClientError, match="no broker is known to have"):
        setup.session.tpc_rollback(xid)


def test_a_commit_without_answer(stack: contextlib.ExitStack) -> None:
    """MQ-076: the outcome is unknown, and recover tells: what it lists can be committed again, at the same broker."""
    setup = Setup(stack, count=2)
    for resource in setup.resources:
        resource.wanted["COMMIT_TWO_PHASE"] = [None]
    xid = setup.prepared()
    with pytest.raises(
        OutcomeUnknown, match=r"COMMIT_TWO_PHASE of XID:1:78::myapp-host1 may or may not .* tpc_recover"
    ) as unknown:
        setup.session.tpc_commit()
    assert unknown.value.xid == xid
    setup.session.tpc_commit(xid)
    used = [resource for resource in setup.resources if resource.steps]
    assert [resource.steps for resource in used] == [["BEGIN", "END", "PREPARE", *["COMMIT_TWO_PHASE"] * 2]]


def test_a_commit_in_one_phase_without_answer(stack: contextlib.ExitStack) -> None:
    """MQ-076: recover cannot tell then, and the error says so."""
    setup = Setup(stack)
    setup.resource.wanted["COMMIT_ONE_PHASE"] = [None]
    setup.session.tpc_begin(setup.session.xid(1, "g", "b"))
    with pytest.raises(OutcomeUnknown, match="only its messages show it"):
        setup.session.tpc_commit()
    assert setup.session.branch is None


def test_a_vote_without_answer_can_be_rolled_back(stack: contextlib.ExitStack) -> None:
    """MQ-076: whether the broker has prepared the branch or not."""
    setup = Setup(stack)
    setup.resource.wanted["PREPARE"] = [None]
    with pytest.raises(OutcomeUnknown, match=r"PREPARE of .*; tpc_rollback\(\) ends it"):
        setup.prepared()
    setup.session.tpc_rollback()
    assert setup.resource.steps[-1] == "ROLLBACK"


# -- misuse -----------------------------------------------------------------------------------------------------------


def test_steps_out_of_order(stack: contextlib.ExitStack) -> None:
    """MQ-075: what cannot be right is never sent."""
    setup = Setup(stack)
    session = setup.session
    for step in (session.tpc_prepare, session.tpc_commit, session.tpc_rollback, session.leave):
        with pytest.raises(ClientError, match="is in no branch"):
            step()
    with pytest.raises(ClientError, match="is in no branch"):
        session.send("orders", b"")
    session.tpc_begin(session.xid(1, "g", "b"))
    for decide in (session.tpc_commit, session.tpc_rollback, session.tpc_begin):
        with pytest.raises(ClientError, match="is in the branch XID:1:67:62"):
            decide(XID)
    with pytest.raises(ClientError, match="is not prepared, so it cannot be kept"):
        session.leave()
    session.tpc_prepare()
    with pytest.raises(ClientError, match="is already prepared"):
        session.tpc_prepare()
    with pytest.raises(ClientError, match="no message can join it"):
        session.send("orders", b"")
    session.leave()
    assert setup.resource.steps == ["BEGIN", "END", "PREPARE"]


def test_a_qualifier_must_be_found_again(stack: contextlib.ExitStack) -> None:
    """MQ-075: one token of a line, no part of a key, and no number, which brokers take for the timeout."""
    for bad in ("two words", "a:b", "4711", "naïve"):
        with pytest.raises(BadRequest, match="is not made of printable ASCII"):
            connect("127.0.0.1:1", qualifier=bad)
    with pytest.raises(BadRequest, match="branch_timeout_s is -1"):
        connect("127.0.0.1:1", branch_timeout_s=-1)
    with pytest.raises(BadRequest, match="is not the address of a broker"):
        connect(" ; ")
    setup = Setup(stack)
    with pytest.raises(BadRequest, match="does not have this session's qualifier myapp-host1"):
        setup.session.tpc_begin(XID._replace(qualifier="other"))
    with pytest.raises(BadRequest, match="gtrid has 65 bytes, the limit is 64"):
        setup.session.xid(1, b"x" * 65, b"")
    assert re.fullmatch("[!-9;-~]+", default_qualifier())
    assert connect("127.0.0.1:1").qualifier == default_qualifier()


def test_a_session_belongs_to_one_thread_at_a_time(stack: contextlib.ExitStack) -> None:
    """MQ-075: a second call while one is under way is refused; one after the other they may come from any thread."""
    asked, go_on = threading.Event(), threading.Event()

    def answer(commands: list[Command]) -> bytes:
        asked.set()
        assert go_on.wait(LONG_S)
        return b"".join(write_result(200, "", opaque(command)) for command in commands)

    broker = stack.enter_context(FakeBroker(answer))
    session = stack.enter_context(connect(f"127.0.0.1:{broker.port}", timeout_s=LONG_S))
    other = threading.Thread(target=session.tpc_begin, args=(session.xid(1, "g", "b"),))
    other.start()
    try:
        assert asked.wait(LONG_S)
        with pytest.raises(ClientError, match="only one thread at a time may use a session"):
            session.send("orders", b"")
    finally:
        go_on.set()
        other.join()
    session.tpc_rollback()


def test_closing_rolls_back_what_is_not_prepared(stack: contextlib.ExitStack) -> None:
    """MQ-076: and leaves what is."""
    for prepared, last in ((False, "ROLLBACK"), (True, "PREPARE")):
        setup = Setup(stack)
        setup.session.tpc_begin(setup.session.xid(1, "g", "b"))
        if prepared:
            setup.session.tpc_prepare()
        setup.session.close()
        assert setup.resource.steps[-1] == last
        with pytest.raises(ClientError, match="was closed"):
            setup.session.tpc_recover()


# -- recovery ---------------------------------------------------------------------------------------------------------


def listing(*xids: Xid) -> tuple[int, str]:
    return 200, "\r\n".join(map(str, xids))


def test_a_branch_is_decided_where_it_was_listed(stack: contextlib.ExitStack) -> None:
    """MQ-076: every broker is asked, and the outcome goes to the one that has the branch."""
    setup = Setup(stack, count=3)
    xids = [XID._replace(format_id=number) for number in range(3)]
    for xid, resource in zip(xids, setup.resources, strict=True):
        resource.wanted["RECOVER"] = [listing(xid)]
    with pytest.raises(ClientError, match="call tpc_recover first"):
        setup.session.tpc_commit(xids[0])
    assert setup.session.tpc_recover() == xids
    setup.session.tpc_commit(xids[0])
    setup.session.tpc_rollback(xids[1])
    setup.session.forget(xids[2])
    assert [resource.steps for resource in setup.resources] == [
        ["RECOVER", "COMMIT_TWO_PHASE"],
        ["RECOVER", "ROLLBACK"],
        ["RECOVER", "FORGET"],
    ]


def test_a_broker_that_cannot_be_asked_is_told(stack: contextlib.ExitStack) -> None:
    """MQ-076: the branches of the others are listed; with none left the error is raised."""
    setup = Setup(stack, count=2)
    setup.resources[0].wanted["RECOVER"] = [None, xa_error(-7), None]
    setup.resources[1].wanted["RECOVER"] = [listing(XID), listing(XID), None]
    for _ in range(2):  # without an answer, and with that of a broker whose decisions are not on enough replicas yet
        assert setup.session.tpc_recover() == [XID]
        assert list(setup.session.unreachable) == [setup.places[0]]
    with pytest.raises(ConnectionFailed):
        setup.session.tpc_recover()
    setup.resources[1].wanted["RECOVER"] = [(200, "TX:a:1")]
    with pytest.raises(ClientError, match="'TX:a:1', which is not a branch"):
        setup.session.tpc_recover()


def test_resolve(stack: contextlib.ExitStack) -> None:
    """MQ-078: each branch as its transaction ended; what nobody knows is left, what an operator decided is compared."""
    setup = Setup(stack, count=2)
    names = ("committed", "not", "unknown", "gone", "same", "other", "silent", "busy")
    xids = {name: XID._replace(gtrid=name.encode()) for name in names}
    resource = setup.resources[0]
    resource.wanted = {
        "RECOVER": [listing(*xids.values())],
        "COMMIT_TWO_PHASE": [(200, ""), xa_error(-4), xa_error(7), xa_error(-7)],
        "ROLLBACK": [(200, ""), xa_error(7), None],
    }
    setup.resources[1].wanted["RECOVER"] = [None]
    outcomes = {"committed": True, "not": False, "unknown": None, "gone": True, "same": True, "other": False, "silent": False}
    done = resolve(setup.session, lambda xid: outcomes.get(xid.gtrid.decode(), True))
    undecided = [xids["unknown"], xids["silent"], xids["busy"]]
    assert done[:4] == Resolved(1, 1, undecided, [xids["other"]], {})[:4]
    assert list(done.unreachable) == [setup.places[1]]
    assert resource.steps.count("FORGET") == 1
