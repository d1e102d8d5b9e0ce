"""The parts of the consumer that leases: what it knows of a lease, its acks, and its polls, with scripted brokers."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.client import LeaseConsumer, connect
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import Done, Outcome, RemotingRequest
from metaq.client.leasing import polling
from metaq.client.leasing.lease import BACK_OFF_S, Lease, back_off_s
from metaq.client.leasing.requests import LeaseTerms, read_popped
from metaq.client.leasing.settling import PAUSE_S, Settling
from metaq.client.message import ReceivedMessage
from metaq.client.retries import Backoff
from metaq.errors import BadRequest, ClientClosed, ConnectionFailed, LeaseLost, Refused, SendFailed, StreamLost
from metaq.protocol.remoting.codes import JSON, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand, encode_response
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.acks import MOST_ACKS, decode_batch_ack
from metaq.protocol.remoting.leases.described import PoppedQueue, describe_popped
from metaq.protocol.remoting.leases.pop import (
    AckMessage,
    ChangeInvisibleTime,
    PopAnswer,
    PopMessage,
)
from metaq.protocol.remoting.leases.receipts import Receipt, decode_receipt
from metaq.protocol.subscription import parse_subscription
from metaq.testing.log import BROKER_NAME, Letter, Log
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, Script, route_to

DEADLINE_S: Final = 60.0
TERMS: Final = LeaseTerms("orders", "billing", parse_subscription("orders", "*"), 60_000, from_first=False)
SECONDS = st.floats(min_value=1, max_value=1e5)

# -- leases -----------------------------------------------------------------------------------------------------------


def leases(count: int) -> list[Lease]:
    log = Log()
    for number in range(count):
        log.put(Letter("orders", 0, b"%d" % number, {}))
    return [
        Lease(message, Receipt(0, 17, 60_000, 4711, 0, BROKER_NAME, 0, message.queue_offset), time.monotonic(), 60.0)
        for message in log.messages("orders")
    ]


@given(SECONDS, SECONDS, st.floats(min_value=-1, max_value=2))
def test_a_lease_is_extended_when_half_of_its_time_is_over(began_s: float, invisible_s: float, passed: float) -> None:
    """E-08: also one that was extended; never one that is finished, lost or being extended."""
    (lease,) = leases(1)
    lease = Lease(lease.message, lease.receipt, began_s, invisible_s)
    now_s = began_s + passed * invisible_s
    assert lease.wants_extension(now_s) == (now_s >= lease.ends_s - invisible_s / 2)
    assert lease.is_usable(now_s) == (now_s < lease.ends_s)
    lease.extend(now_s, invisible_s)
    assert not lease.wants_extension(now_s)
    late_s = lease.ends_s
    assert lease.wants_extension(late_s)
    lease.is_finished = True
    assert not lease.wants_extension(late_s)
    lease.is_finished, lease.lost = False, "given again"
    assert not lease.wants_extension(late_s)
    assert not lease.is_usable(now_s)


def test_pauses_grow_with_the_attempts() -> None:
    """E-08: as those of RocketMQ's Java client."""
    assert [back_off_s(attempt) for attempt in range(1, 17)] == list(BACK_OFF_S)
    assert back_off_s(17) == back_off_s(1000) == 7200
    assert list(BACK_OFF_S) == sorted(BACK_OFF_S)


def test_an_answer_whose_header_does_not_describe_its_records_is_refused() -> None:
    log = Log()
    log.put(Letter("orders", 0, b"a", {}))
    body = b"".join(log.topics["orders"][0].records)

    def answer(description: PopAnswer, body: bytes) -> RemotingCommand:
        return answered(0, encode_header(description), body)

    good = PopAnswer(17, 60_000, Int32(4711), 0, *describe_popped([PoppedQueue(0, [0])]))
    ((message, receipt),) = read_popped(answer(good, body), BROKER_NAME, "orders", 1)
    assert (message.body, str(receipt)) == (b"a", f"0 17 60000 4711 0 {BROKER_NAME} 0 0")
    with pytest.raises(BadRequest):
        read_popped(answer(good._replace(msg_offset_info="0 0 0,1"), body), BROKER_NAME, "orders", 1)
    with pytest.raises(StreamLost):
        read_popped(answer(good, body[:-1]), BROKER_NAME, "orders", 1)


# -- acks -------------------------------------------------------------------------------------------------------------


def answered(code: int, fields: dict[str, str] | None = None, body: bytes = b"") -> RemotingCommand:
    return RemotingCommand(code, 0, 1, fields or {}, body, "given again" if code else None, "JAVA", 1, JSON)


class Scripted:
    """A core whose broker answers when the test says so, and whose tasks run at once, or when the test says so."""

    def __init__(self) -> None:
        self.timeout_s = DEADLINE_S
        self.is_closing = False
        self.looked = 0
        self.sent: deque[tuple[RemotingRequest, Done]] = deque()
        self.planned: list[Callable[[], None]] = []
        self.scheduler = SimpleNamespace(run=lambda task: task(), after=lambda seconds, task: self.planned.append(task))
        self.transport = self
        self.settling = Settling(cast(Core, self), TERMS, self.look)

    def submit(self, address: str, request: RemotingRequest, deadline: float, done: Done) -> None:
        self.sent.append((request, done))

    def master(self, name: str) -> str:
        return name

    def look(self) -> None:
        self.looked += 1

    def take(self) -> tuple[int, list[int], Callable[[Outcome], None]]:
        """Return the code of the oldest request, the offsets that it acks, and what answers it."""
        request, done = self.sent.popleft()
        if request.code == Request.ACK_MESSAGE:
            header = decode_header(AckMessage, request.fields or {})
            assert decode_receipt(header.extra_info).offset == header.offset
            return request.code, [header.offset], done
        return request.code, [offset for row in decode_batch_ack(request.body).acks for offset in row.offsets()], done

    def run_planned(self) -> None:
        planned, self.planned = self.planned, []
        for task in planned:
            task()


def error_of(told: "Future[None]") -> BaseException | None:
    return told.exception(timeout=0)


def test_acks_that_come_while_one_is_in_flight_go_together() -> None:
    """E-08: the first at once, the others with the next request; none waits for more to come."""
    core = Scripted()
    told = [core.settling.ack(lease) for lease in leases(5)]
    code, offsets, done = core.take()
    assert (code, offsets, len(core.sent)) == (Request.ACK_MESSAGE, [0], 0)
    done(answered(0))
    assert [one.done() for one in told] == [True, False, False, False, False]
    code, offsets, done = core.take()
    assert (code, offsets) == (Request.BATCH_ACK_MESSAGE, [1, 2, 3, 4])
    done(answered(0, {"done": "4"}))
    assert [error_of(one) for one in told] == [None] * 5
    assert not core.sent


def test_a_batch_has_no_more_acks_than_a_broker_takes() -> None:
    core = Scripted()
    told = [core.settling.ack(lease) for lease in leases(MOST_ACKS + 3)]
    sizes = []
    while core.sent:
        _, offsets, done = core.take()
        sizes.append(len(offsets))
        done(answered(0, {"done": str(len(offsets))}))
    assert sizes == [1, MOST_ACKS, 2]
    assert all(error_of(one) is None for one in told)


def test_each_ack_of_a_batch_that_counted_for_less_is_asked_about() -> None:
    """E-08: so that the program learns which of its messages was lost, and why."""
    core = Scripted()
    told = [core.settling.ack(lease) for lease in leases(4)]
    core.take()[2](answered(0))
    _, offsets, done = core.take()
    done(answered(0, {"done": "2"}))
    for offset in offsets:
        code, (asked,), done = core.take()
        assert (code, asked) == (Request.ACK_MESSAGE, offset)
        done(answered(Response.NO_MESSAGE if offset == 2 else 0))
    assert not core.sent
    errors = [error_of(one) for one in told]
    assert [type(error) for error in errors] == [type(None), type(None), LeaseLost, type(None)]
    assert "given again" in str(errors[2])


@pytest.mark.parametrize(("fields", "code", "follow"), [({}, 0, 0), ({}, Response.REQUEST_CODE_NOT_SUPPORTED, 2)])
def test_brokers_of_rocketmq_that_do_not_count_or_know_no_batches(fields: dict[str, str], code: int, follow: int) -> None:
    core = Scripted()
    told = [core.settling.ack(lease) for lease in leases(3)]
    core.take()[2](answered(0))
    core.take()[2](answered(code, fields))
    for _ in range(follow):
        core.take()[2](answered(0))
    assert not core.sent
    assert [error_of(one) for one in told] == [None] * 3


def test_acks_are_sent_again_while_their_broker_is_lost() -> None:
    """E-08: until their time is over."""
    core = Scripted()
    first, second = leases(2)
    told = core.settling.ack(first)
    for outcome in (ConnectionFailed("lost"), answered(Response.SERVICE_NOT_AVAILABLE)):
        core.take()[2](outcome)
        assert not core.sent
        assert not told.done()
        core.run_planned()
    assert core.looked == 2
    core.timeout_s = PAUSE_S / 2
    hasty = core.settling.ack(second)
    core.take()[2](answered(0))
    assert error_of(told) is None
    core.take()[2](ConnectionFailed("lost"))
    assert isinstance(error_of(hasty), ConnectionFailed)
    assert not core.planned


def test_a_refusal_is_not_repeated() -> None:
    core = Scripted()
    told = core.settling.ack(leases(1)[0])
    core.take()[2](answered(Response.NO_PERMISSION))
    error = error_of(told)
    assert isinstance(error, Refused)
    assert not isinstance(error, LeaseLost)
    assert not core.planned


def test_another_time_is_told_as_it_is() -> None:
    core = Scripted()
    (lease,) = leases(1)
    told = core.settling.change(lease, 1500)
    request, done = core.sent.popleft()
    header = decode_header(ChangeInvisibleTime, request.fields or {})
    assert (request.code, header.invisible_time, header.bname) == (Request.CHANGE_MESSAGE_INVISIBLETIME, 1500, BROKER_NAME)
    assert decode_receipt(header.extra_info) == lease.receipt
    done(answered(Response.MESSAGE_ILLEGAL))
    assert isinstance(error_of(told), LeaseLost)


def test_an_extension_that_fails_looks_for_another_master() -> None:
    """E-08: with long handlers there may be no polls and no acks that would."""
    core = Scripted()
    refusals = map(answered, (Response.SERVICE_NOT_AVAILABLE, Response.NO_PERMISSION))
    outcomes: list[Outcome] = [ConnectionFailed("lost"), *refusals]
    for outcome, looked in zip(outcomes, (1, 2, 2), strict=True):
        told = core.settling.change(leases(1)[0], 1500)
        core.sent.popleft()[1](outcome)
        assert isinstance(error_of(told), ConnectionFailed | Refused)
        assert core.looked == looked


def test_after_the_end_of_the_client_nothing_is_told() -> None:
    core = Scripted()
    first, second = leases(2)
    hanging = core.settling.ack(first)
    core.is_closing = True
    core.settling.leave(0.0)
    for told in (hanging, core.settling.ack(second), core.settling.change(second, 0)):
        assert isinstance(error_of(told), ClientClosed)


# -- polls ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "READ_BACKOFF", Backoff(first=0.05, most=0.05))


def held(request: RemotingCommand) -> Reply | None:
    """Hold a poll for ever."""
    return None


def serving(**scripts: Script) -> FakeRemoting:
    server = FakeRemoting(heart_beat=lambda request: Reply(), unregister_client=lambda request: Reply(), **scripts)
    server.scripts[Request.GET_ROUTEINFO_BY_TOPIC] = route_to({BROKER_NAME: server.address})
    return server


def in_turn(*replies: Reply | None) -> Script:
    """Answer with one after the other, and hold what follows."""
    left: Iterator[Reply | None] = iter(replies)
    return lambda request: next(left, None)


def given_one(body: bytes, tag: str = "") -> Reply:
    log = Log()
    log.put(Letter("orders", 0, body, {"TAGS": tag} if tag else {}))
    answer = PopAnswer(17, 60_000, Int32(4711), 0, *describe_popped([PoppedQueue(0, [0])]))
    return Reply(0, encode_header(answer), b"".join(log.topics["orders"][0].records))


def pops(server: FakeRemoting) -> list[PopMessage]:
    return [decode_header(PopMessage, one.fields) for one in server.requests if one.code == Request.POP_MESSAGE]


@contextmanager
def consuming(server: FakeRemoting, **parameters: Any) -> Iterator[LeaseConsumer]:
    with connect(server.address, timeout_s=DEADLINE_S) as client, client.lease_consumer("orders", "g", **parameters) as found:
        yield found


def received(server: FakeRemoting, **parameters: Any) -> ReceivedMessage:
    with consuming(server, **parameters) as consumer:
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None
        return message


def test_a_poll_says_what_is_wanted() -> None:
    with serving(pop_message=in_turn(given_one(b"a"))) as server:
        assert received(server, batch=5, invisible=90, wait=4, from_first=True, sql="n > 1").body == b"a"
        (pop,) = pops(server)
        assert (pop.consumer_group, pop.topic, pop.queue_id, pop.max_msg_nums) == ("g", "orders", -1, 5)
        assert (pop.invisible_time, pop.poll_time, pop.init_mode, pop.bname) == (90_000, 4000, 0, BROKER_NAME)
        assert (pop.exp_type, pop.exp) == ("SQL92", "n > 1")


@pytest.mark.parametrize(
    "reply",
    [
        Reply(Response.POLLING_TIMEOUT),
        Reply(Response.PULL_NOT_FOUND),
        Reply(Response.POLLING_FULL, remark="too many wait"),
        Reply(Response.SYSTEM_BUSY, remark="overloaded; retry after 20 ms"),
        Reply(Response.SERVICE_NOT_AVAILABLE, remark="not the master"),
        Reply(Response.TOPIC_NOT_EXIST, remark="no topic"),
        Reply(Response.SYSTEM_ERROR, remark="?"),
        Reply(0, {"popTime": "x"}, b"x"),
    ],
    ids=lambda reply: str(reply.code),
)
def test_polls_go_on_whatever_is_answered(reply: Reply) -> None:
    """E-08: one at a time."""
    with serving(pop_message=in_turn(reply, reply, given_one(b"a"))) as server:
        assert received(server).body == b"a"
        assert len(pops(server)) == 3


def test_a_poll_that_need_not_be_held_is_followed_by_a_pause() -> None:
    """E-08: an idle topic is not asked for as fast as brokers answer."""
    with serving(pop_message=lambda request: Reply(Response.POLLING_TIMEOUT)) as server, consuming(server, wait=0) as consumer:
        assert consumer.receive(timeout_s=0.5) is None
        assert 1 <= len(pops(server)) < 50  # a thousand without; an answer that comes late is followed by none


def test_polls_go_over_to_the_next_master_though_a_send_has_forgotten_the_route() -> None:
    """E-08: nothing else in the process may ask for the route of that topic again."""
    with serving() as registry, serving(pop_message=in_turn(given_one(b"a"))) as slave:
        with serving(pop_message=held) as master:
            registry.scripts[Request.GET_ROUTEINFO_BY_TOPIC] = route_to({BROKER_NAME: master.address})
            client = connect(registry.address, timeout_s=DEADLINE_S)
            consumer = client.lease_consumer("orders", "g")
            assert consumer.receive(timeout_s=0.05) is None
            wait_until(lambda: len(pops(master)) == 1, DEADLINE_S, "it polls")
        with client, consumer:
            with pytest.raises(SendFailed):
                client.producer().send("orders", b"x", timeout_s=0.3)
            registry.scripts[Request.GET_ROUTEINFO_BY_TOPIC] = route_to({BROKER_NAME: slave.address})
            message = consumer.receive(timeout_s=DEADLINE_S / 4)
            assert message is not None
            assert message.body == b"a"


def test_a_lost_connection_is_made_again() -> None:
    with serving(pop_message=held) as server, consuming(server) as consumer:
        assert consumer.receive(timeout_s=0.05) is None
        wait_until(lambda: len(pops(server)) == 1, DEADLINE_S, "it polls")
        server.scripts[Request.POP_MESSAGE] = in_turn(given_one(b"a"))
        server.hang_up()
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None


def test_nothing_is_asked_for_while_nobody_waits() -> None:
    """E-08: a program that is busy leases no more than it has."""
    with serving(pop_message=in_turn(given_one(b"a"))) as server, consuming(server) as consumer:
        time.sleep(0.05)
        assert pops(server) == []
        assert consumer.receive(timeout_s=DEADLINE_S) is not None
        time.sleep(0.05)
        assert len(pops(server)) == 1


def test_a_hash_that_is_equal_by_chance_is_not_a_tag() -> None:
    """RD-101: such a message is done without being consumed: brokers of RocketMQ compare hashes only."""
    acks = []

    def ack(request: RemotingCommand) -> Reply:
        acks.append(request)
        return Reply()

    with serving(pop_message=in_turn(given_one(b"other", "BB"), given_one(b"mine", "Aa")), ack_message=ack) as server:
        assert received(server, tags="Aa").body == b"mine"
        wait_until(lambda: len(acks) == 1, DEADLINE_S, "the other is acked")


def test_what_comes_after_the_end_is_given_back() -> None:
    """E-08: a poll may be answered after its consumer was closed."""
    changes = []

    def change(request: RemotingCommand) -> Reply:
        changes.append(decode_header(ChangeInvisibleTime, request.fields))
        return Reply()

    with serving(pop_message=held, change_message_invisibletime=change) as server, consuming(server) as consumer:
        assert consumer.receive(timeout_s=0.05) is None
        wait_until(lambda: len(pops(server)) == 1, DEADLINE_S, "it polls")
        consumer.close()
        late = given_one(b"late")
        (poll,) = (request for request in server.requests if request.code == Request.POP_MESSAGE)
        server.connections[-1].sendall(encode_response(poll, 0, late.fields, None, len(late.body)) + late.body)
        wait_until(lambda: len(changes) == 1, DEADLINE_S, "it is given back")
    assert changes[0].invisible_time == 0


def test_a_member_answers_its_broker() -> None:
    """E-08: with its state, for administrators; it consumes nothing on command."""
    with serving(pop_message=held) as server, consuming(server) as consumer:
        for code, expected in (
            (Request.GET_CONSUMER_RUNNING_INFO, 0),
            (Request.RESET_CONSUMER_CLIENT_OFFSET, 0),
            (Request.CONSUME_MESSAGE_DIRECTLY, Response.REQUEST_CODE_NOT_SUPPORTED),
        ):
            assert consumer._holder._asked(answered(code)).code == expected
