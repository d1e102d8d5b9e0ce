"""Messages that follow a local transaction: the bytes on the wire, and the checks of undecided ones."""

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from metaq.client import HalfMessage, Outcome, connect
from metaq.client.connecting.link import Links
from metaq.errors import BadRequest, ClientClosed, ClientError, Refused, RequestTimeout
from metaq.message import LogOffset
from metaq.protocol.ids import OffsetId, encode_offset_id
from metaq.protocol.properties import parse
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.heartbeats import decode_heartbeat
from metaq.protocol.remoting.routes import BrokerData, ClusterInfo, encode_cluster_info
from metaq.testing.log import Letter, Log
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, Script, route_to

DEADLINE_S = 60.0
GROUP = "order-desk"
ORDINAL = 7
PLACE = 4711
BORN_MS = 1_700_000_000_000
SEND, END, CHECK = Request.SEND_MESSAGE_V2, Request.END_TRANSACTION, Request.CHECK_TRANSACTION_STATE
COMMIT, ROLLBACK, UNKNOWN = Outcome.COMMIT, Outcome.ROLLBACK, Outcome.UNKNOWN


def stored(request: RemotingCommand, code: int = Response.SUCCESS) -> Reply:
    """Take a half message: it is always the same place."""
    offset_id = encode_offset_id(OffsetId("127.0.0.1", 1, LogOffset(PLACE)))
    return Reply(code, {"msgId": offset_id, "queueId": request.fields["e"], "queueOffset": str(ORDINAL)})


def clusters_of(*brokers: FakeRemoting) -> Script:
    """Return the script of a registry that knows these brokers: the first is a, the next b."""
    rows = {name: BrokerData("DefaultCluster", name, {0: broker.address}) for name, broker in zip("abc", brokers, strict=False)}
    return lambda request: Reply(body=encode_cluster_info(ClusterInfo(rows, {"DefaultCluster": list(rows)})))


class Desk:
    """A listener that does as it is told, and a client of one fake broker."""

    def __init__(self, stack: ExitStack) -> None:
        self.outcome: object = COMMIT
        self.found: object = COMMIT
        self.executed: list[tuple[HalfMessage, object]] = []
        self.checked: list[HalfMessage] = []
        self.may_check = threading.Event()
        self.may_check.set()
        self.broker = stack.enter_context(FakeRemoting(send_message_v2=stored, heart_beat=lambda request: Reply()))
        registry = FakeRemoting(
            get_routeinfo_by_topic=route_to({"a": self.broker.address}), get_broker_cluster_info=clusters_of(self.broker)
        )
        self.client = stack.enter_context(connect(stack.enter_context(registry).address, timeout_s=DEADLINE_S))
        self.producer = self.client.transaction_producer(GROUP, self.execute, check=self.check)

    def execute(self, message: HalfMessage, argument: object) -> Outcome:
        self.executed.append((message, argument))
        return told(self.outcome)

    def check(self, message: HalfMessage) -> Outcome:
        self.checked.append(message)
        assert self.may_check.wait(DEADLINE_S)
        return told(self.found)

    def ends(self) -> list[dict[str, str]]:
        """Return the fields of the decisions that the broker received."""
        return [request.fields for request in self.broker.requests if request.code == END]

    def wait_for_ends(self, count: int) -> list[dict[str, str]]:
        wait_until(lambda: self.broker.count(END) >= count, DEADLINE_S, f"{count} outcomes are told")
        return self.ends()

    def ask(self, body: bytes = b"paid 2003", *, group: str = GROUP, key: str = "AB" * 16, ordinal: int = ORDINAL) -> None:
        """Ask about a half message."""
        properties = {"UNIQ_KEY": key, "PGROUP": group, "TRAN_MSG": "true", "TAGS": "paid", "KEYS": "2003 x"}
        record = Log().encode(Letter("orders", 3, body, properties, born_ms=BORN_MS), ordinal, PLACE)
        fields = {"tranStateTableOffset": str(ordinal), "commitLogOffset": str(PLACE), "msgId": key, "transactionId": key}
        self.broker.push(CHECK, fields, record, oneway=True)


def told(what: object) -> Outcome:
    if isinstance(what, Exception):
        raise what
    return what  # type: ignore[return-value]  # also what no listener should return


@pytest.fixture
def desk() -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(stack)


# -- sending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outcome", "code"), [(COMMIT, "8"), (ROLLBACK, "12"), (UNKNOWN, "0")])
def test_the_outcome_follows_the_half_message(desk: Desk, outcome: Outcome, code: str) -> None:
    """RD-105, remoting 3.2.8: a half message, then the local transaction, then one way what became of it."""
    desk.outcome = outcome
    result = desk.producer.send(
        "orders", b"paid 2003", tag="paid", keys="2003 x", properties={"city": "Kiel"}, argument="an argument"
    )
    assert (result.outcome, result.error, result.sent.queue_offset) == (outcome, None, ORDINAL)

    (half,) = [request for request in desk.broker.requests if request.code == SEND]
    properties = parse(half.fields["i"])
    assert (half.fields["a"], half.fields["b"], half.fields["f"]) == (GROUP, "orders", "4")
    assert {"TRAN_MSG": "true", "PGROUP": GROUP, "UNIQ_KEY": result.sent.id, "city": "Kiel"}.items() <= properties.items()

    (fields,) = desk.wait_for_ends(1)
    (end,) = [request for request in desk.broker.requests if request.code == END]
    assert end.is_oneway
    assert fields == {
        "producerGroup": GROUP,
        "tranStateTableOffset": str(ORDINAL),
        "commitLogOffset": str(PLACE),
        "commitOrRollback": code,
        "msgId": result.sent.id,
        "transactionId": result.sent.id,
        "fromTransactionCheck": "false",
    }
    ((message, argument),) = desk.executed
    assert (message.id, message.topic, message.body, message.tag) == (result.sent.id, "orders", b"paid 2003", "paid")
    assert (message.keys, message.properties, argument) == (("2003", "x"), properties, "an argument")
    assert str(message.born_ms) == half.fields["g"]


def test_a_long_half_message_travels_compressed(desk: Desk) -> None:
    """SG-098: both bits are there, and the local transaction sees the body as it was given."""
    body = b"paid " * 10_000
    desk.producer.send("orders", body)
    (half,) = [request for request in desk.broker.requests if request.code == SEND]
    assert (half.fields["f"], len(half.body) < len(body) // 10) == (str(0x301 | 4), True)
    assert desk.executed[0][0].body == body


@pytest.mark.parametrize("failure", [ValueError("no such customer"), None])
def test_a_local_transaction_that_fails(desk: Desk, caplog: pytest.LogCaptureFixture, failure: Exception | None) -> None:
    """RD-105: what it raised, or that it returned no outcome, is in the result and in the log; the broker will ask."""
    desk.outcome = failure
    result = desk.producer.send("orders", b"paid 2003")
    assert result.outcome is UNKNOWN
    if failure is not None:
        assert result.error is failure
    else:
        assert isinstance(result.error, BadRequest)
    assert desk.wait_for_ends(1)[0]["commitOrRollback"] == "0"
    assert any("local transaction failed" in record.message and result.sent.id in record.message for record in caplog.records)
    desk.ask(key=result.sent.id)
    assert desk.wait_for_ends(2)[1]["commitOrRollback"] == "8"


def test_an_interrupted_local_transaction_is_found_out_by_asking(desk: Desk) -> None:
    """RD-105: what is no ordinary error goes through; nothing is told, and the check is called."""
    interrupt = KeyboardInterrupt()
    ids: list[str] = []

    def execute(message: HalfMessage, argument: object) -> Outcome:
        ids.append(message.id)
        raise interrupt

    producer = desk.client.transaction_producer("interrupted", execute, check=desk.check)
    with pytest.raises(KeyboardInterrupt):
        producer.send("orders", b"paid 2003")
    assert desk.ends() == []
    desk.ask(key=ids[0], group="interrupted")
    (end,) = desk.wait_for_ends(1)
    assert (end["commitOrRollback"], end["msgId"], end["producerGroup"]) == ("8", ids[0], "interrupted")


@pytest.mark.parametrize("code", [Response.FLUSH_DISK_TIMEOUT, Response.SLAVE_NOT_AVAILABLE, Response.FLUSH_SLAVE_TIMEOUT])
def test_a_half_message_that_is_not_safe_is_dropped(desk: Desk, code: int) -> None:
    """RD-105: the local transaction could succeed and its message be lost; it is not begun."""
    desk.broker.scripts[SEND] = lambda request: stored(request, code)
    result = desk.producer.send("orders", b"paid 2003")
    assert (result.outcome, result.sent.status.value, desk.executed) == (ROLLBACK, code, [])
    assert desk.wait_for_ends(1)[0]["commitOrRollback"] == "12"


def test_a_half_message_that_is_not_stored(desk: Desk) -> None:
    """RD-105: an error of send means that the local transaction was not begun; should the broker ask, the check is called."""
    desk.broker.scripts[SEND] = lambda request: Reply(Response.MESSAGE_ILLEGAL, remark="not that one")
    with pytest.raises(Refused, match="not that one"):
        desk.producer.send("orders", b"paid 2003")
    desk.broker.scripts[SEND] = lambda request: None
    with pytest.raises(RequestTimeout):
        desk.producer.send("orders", b"paid 2004", timeout_s=0.2)
    assert desk.executed == []
    lost = [parse(request.fields["i"])["UNIQ_KEY"] for request in desk.broker.requests if request.code == SEND][-1]
    desk.found = ROLLBACK
    desk.ask(key=lost)
    assert desk.wait_for_ends(1)[0]["commitOrRollback"] == "12"


def test_a_broker_that_is_gone_will_ask(caplog: pytest.LogCaptureFixture) -> None:
    """RD-105: the result says what the local transaction has come to, the log that nobody could be told."""
    with ExitStack() as stack, ExitStack() as going:
        broker = going.enter_context(FakeRemoting(send_message_v2=stored))
        registry = stack.enter_context(FakeRemoting(get_routeinfo_by_topic=route_to({"a": broker.address})))
        client = stack.enter_context(connect(registry.address))
        links = client._core.transport
        assert isinstance(links, Links)

        def execute(message: HalfMessage, argument: object) -> Outcome:
            going.close()
            wait_until(
                lambda: broker.address not in {link.address for link in links._alive()}, DEADLINE_S, "the connection is lost"
            )
            return COMMIT

        producer = client.transaction_producer(GROUP, execute, check=lambda message: COMMIT)
        result = producer.send("orders", b"paid 2003")
    assert (result.outcome, result.error) == (COMMIT, None)
    assert "outcome not told, the broker will ask" in caplog.text


@pytest.mark.parametrize("name", ["DELAY", "REPLY_TO_CLIENT", "TIMER_DELAY_MS", "__STARTDELIVERTIME"])
def test_what_cannot_be_transactional(desk: Desk, name: str) -> None:
    """RD-105: a delayed message or a request is refused before anything is sent."""
    with pytest.raises(BadRequest, match=f"property {name}: a transactional message can be neither delayed nor a request"):
        desk.producer.send("orders", b"", properties={name: "3"})
    with pytest.raises(BadRequest, match="property PGROUP is the group of the producer"):
        desk.producer.send("orders", b"", properties={"PGROUP": "others"})
    assert desk.broker.count(SEND) == 0


# -- what brokers ask -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "code"), [(COMMIT, "8"), (ROLLBACK, "12"), (UNKNOWN, "0")])
def test_a_broker_asks(desk: Desk, found: Outcome, code: str) -> None:
    """RD-105, remoting 3.2.8: the check sees the message as it was sent, and its answer goes to who asked."""
    desk.found = found
    desk.producer.send("orders", b"first")
    desk.wait_for_ends(1)
    desk.ask(ordinal=12)
    end = desk.wait_for_ends(2)[1]
    assert end == {
        "producerGroup": GROUP,
        "tranStateTableOffset": "12",
        "commitLogOffset": str(PLACE),
        "commitOrRollback": code,
        "msgId": "AB" * 16,
        "transactionId": "AB" * 16,
        "fromTransactionCheck": "true",
    }
    (message,) = desk.checked
    assert (message.id, message.topic, message.body) == ("AB" * 16, "orders", b"paid 2003")
    assert (message.tag, message.keys, message.born_ms) == ("paid", ("2003", "x"), BORN_MS)


@pytest.mark.parametrize("found", [ConnectionError("no database"), "yes"])
def test_a_check_that_fails_is_asked_for_again(desk: Desk, caplog: pytest.LogCaptureFixture, found: object) -> None:
    """RD-105: it is logged, and nothing is answered."""
    desk.producer.send("orders", b"first")
    desk.found = found
    desk.ask()
    wait_until(lambda: "check failed" in caplog.text, DEADLINE_S, "the failure is logged")
    desk.found = ROLLBACK

    def answered() -> bool:
        desk.ask()  # as a broker does, again and again
        return desk.broker.count(END) > 1

    wait_until(answered, DEADLINE_S, "an answer")
    assert [end["commitOrRollback"] for end in desk.ends()[:2]] == ["8", "12"]


def test_a_slow_check_holds_up_nothing(desk: Desk) -> None:
    """RD-105: sends go on over the same connection; who asks twice is answered once."""
    desk.producer.send("orders", b"first")
    desk.may_check.clear()
    desk.ask()
    wait_until(lambda: bool(desk.checked), DEADLINE_S, "the check runs")
    desk.ask()
    desk.ask(ordinal=8, key="CD" * 16)
    desk.producer.send("orders", b"second")
    wait_until(lambda: len(desk.checked) == 2, DEADLINE_S, "another check runs beside it")
    desk.may_check.set()
    ends = desk.wait_for_ends(4)
    assert sorted(end["tranStateTableOffset"] for end in ends if end["fromTransactionCheck"] == "true") == ["7", "8"]
    assert len(desk.checked) == 2


def test_a_transaction_that_goes_on_is_not_checked(desk: Desk) -> None:
    """RD-105: the check could not find it yet, and would roll it back."""
    asked_twice: queue.Queue[bool] = queue.Queue()

    def execute(message: HalfMessage, argument: object) -> Outcome:
        desk.ask(group="slow", key=message.id)
        desk.ask(group="slow", key="CD" * 16, ordinal=8)
        wait_until(lambda: desk.broker.count(END) == 1, DEADLINE_S, "the other one is answered")
        asked_twice.put(True)
        return COMMIT

    producer = desk.client.transaction_producer("slow", execute, check=desk.check)
    desk.found = ROLLBACK
    result = producer.send("orders", b"paid 2003")
    assert asked_twice.get_nowait()
    ends = desk.wait_for_ends(2)
    assert [(end["msgId"], end["commitOrRollback"]) for end in ends] == [("CD" * 16, "12"), (result.sent.id, "8")]
    assert [message.id for message in desk.checked] == ["CD" * 16]


def test_a_group_that_has_no_producer_here(desk: Desk) -> None:
    """RD-105: the question is left to others; the next one is answered."""
    desk.producer.send("orders", b"first")
    desk.ask(group="others")
    desk.ask(b"another", ordinal=8)
    assert [end["fromTransactionCheck"] for end in desk.wait_for_ends(2)] == ["false", "true"]
    assert [message.body for message in desk.checked] == [b"another"]


def test_a_record_that_is_torn(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """RD-105: it is logged, and the check is not called."""
    desk.producer.send("orders", b"first")
    fields = {"tranStateTableOffset": "1", "commitLogOffset": "2"}
    desk.broker.push(CHECK, fields, b"no record", oneway=True)
    wait_until(lambda: "check failed" in caplog.text, DEADLINE_S, "the failure is logged")
    assert desk.checked == []


# -- being known ------------------------------------------------------------------------------------------------------


def named(broker: FakeRemoting) -> set[str]:
    """The producer groups that heartbeats have named to a broker."""
    beats = [decode_heartbeat(request.body) for request in broker.requests if request.code == Request.HEART_BEAT]
    return {group for beat in beats for group in beat.producers}


def test_all_brokers_know_a_producer_that_has_sent_nothing() -> None:
    """RD-105, SG-087: it may have to answer for one that died."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(FakeRemoting(heart_beat=lambda request: Reply())) for _ in range(2))
        registry = stack.enter_context(FakeRemoting(get_broker_cluster_info=clusters_of(one, other)))
        client = stack.enter_context(connect(registry.address))
        producer = client.transaction_producer(GROUP, lambda message, argument: COMMIT, check=lambda message: COMMIT)
        wait_until(lambda: named(one) == named(other) == {GROUP}, DEADLINE_S, "both brokers know it")
        producer.close()
        gone = [request.fields["producerGroup"] for request in one.requests if request.code == Request.UNREGISTER_CLIENT]
        assert gone == [GROUP]


def test_one_producer_of_a_group(desk: Desk) -> None:
    """RD-105: a client cannot tell two of them apart; after the first is closed there may be another one."""
    with pytest.raises(ClientError, match="already has a transaction producer of group order-desk"):
        desk.client.transaction_producer(GROUP, desk.execute, check=desk.check)
    desk.producer.close()
    desk.producer.close()
    with desk.client.transaction_producer(GROUP, desk.execute, check=desk.check) as producer:
        assert producer.send("orders", b"paid 2003").outcome is COMMIT
    with pytest.raises(BadRequest, match="group 'no group'"):
        desk.client.transaction_producer("no group", desk.execute, check=desk.check)


def test_a_closed_client(desk: Desk) -> None:
    """RD-105: it says so, also when it is closed in the middle of a local transaction."""

    def execute(message: HalfMessage, argument: object) -> Outcome:
        desk.client.close()
        return COMMIT

    producer = desk.client.transaction_producer("closing", execute, check=desk.check)
    assert producer.send("orders", b"paid 2003").outcome is COMMIT
    assert desk.ends() == []
    with pytest.raises(ClientClosed):
        producer.send("orders", b"paid 2004")
    with pytest.raises(ClientClosed):
        desk.client.transaction_producer("another", execute, check=desk.check)
