"""The choice of a broker for a message, and the retries when it fails: against servers that fail on purpose."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from metaq.client import Client, Outcome, OutgoingMessage, SendStatus, connect
from metaq.client.connecting import core
from metaq.client.connecting.health import BrokerHealth
from metaq.client.sending.sending import Outgoing, QueueChoice, Sending
from metaq.errors import (
    BadRequest,
    BrokerBusy,
    ClientError,
    ConnectionFailed,
    NotConnected,
    Refused,
    RequestTimeout,
    RouteNotFound,
    RouteProblem,
    SendFailed,
)
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import READ, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.routes import BrokerData, QueueData, TopicRoute, encode_route
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, Reply, Script, accept, route_to

TIMEOUT_S = 60.0
SEND = Request.SEND_MESSAGE_V2


class Cluster:
    """Two brokers that do as told, and a registry that names them."""

    def __init__(self, stack: ExitStack) -> None:
        self.brokers = {name: stack.enter_context(FakeRemoting(send_message_v2=accept)) for name in ("a", "b")}
        addresses = {name: broker.address for name, broker in self.brokers.items()}
        self.registry = stack.enter_context(FakeRemoting(get_routeinfo_by_topic=route_to(addresses, queues=2)))
        self.client = stack.enter_context(connect(self.registry.address, timeout_s=TIMEOUT_S))
        self.producer = self.client.producer()

    def script(self, script: Script, *names: str) -> None:
        for name in names or self.brokers:
            self.brokers[name].scripts[SEND] = script

    def sends(self) -> list[int]:
        """How many sends each broker got."""
        return [broker.count(SEND) for broker in self.brokers.values()]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(
        core, "BrokerHealth", partial(BrokerHealth, ())
    )  # a machine that stands still for a moment makes no broker a slow one
    with ExitStack() as stack:
        yield Cluster(stack)


def failing(code: int, remark: str = "not here") -> Script:
    return lambda request: Reply(code, remark=remark)


def silent(request: RemotingCommand) -> None:
    return None


# -- tries ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [Response.SYSTEM_ERROR, Response.SERVICE_NOT_AVAILABLE, Response.SYSTEM_BUSY, 205])
def test_the_next_try_is_another_broker(cluster: Cluster, code: int) -> None:
    """SG-134, P10: what one broker refuses for its own reasons goes to the next one."""
    cluster.script(failing(code), "a")
    for _ in range(4):
        assert cluster.producer.send("orders", b"x").queue.broker_name == "b"
    assert cluster.sends()[0] <= 1


def test_at_most_three_tries(cluster: Cluster) -> None:
    """SG-134: and the error tells each of them."""
    cluster.script(failing(1, "out of order"), "a")
    cluster.script(failing(14, "disk full"), "b")
    with pytest.raises(SendFailed) as failed:
        cluster.producer.send("orders", b"x")
    assert sum(cluster.sends()) == 3
    assert [broker for broker, _ in failed.value.attempts] in (["a", "b", "a"], ["b", "a", "b"])
    assert "out of order" in str(failed.value)
    assert "disk full" in str(failed.value)
    assert failed.value.retriable


def test_a_time_out_is_not_followed_by_another_try(cluster: Cluster) -> None:
    """SG-134: the message may be stored; the error says so, and the time is one for all tries."""
    for _ in range(8):  # what comes before a send takes no part of its time then
        cluster.producer.send("orders", b"x")
    before = sum(cluster.sends())
    cluster.script(silent)
    began = time.monotonic()
    with pytest.raises(RequestTimeout, match=r"SEND_MESSAGE_V2 from 127.* its outcome is unknown"):
        cluster.producer.send("orders", b"x", timeout_s=0.2)
    assert time.monotonic() - began >= 0.2
    cluster.script(accept)
    for _ in range(2):
        cluster.producer.send("orders", b"x")
    wait_until(lambda: sum(cluster.sends()) == before + 3, TIMEOUT_S, "one send, and two others")


def test_a_broken_connection_is_followed_by_another_try(cluster: Cluster) -> None:
    """SG-134: the other broker gets the message."""

    def hang_up(request: RemotingCommand) -> None:
        cluster.brokers["a"].hang_up()

    cluster.script(hang_up, "a")
    assert {cluster.producer.send("orders", b"x").queue.broker_name for _ in range(4)} == {"b"}
    assert cluster.sends()[0] <= 1


def test_an_id_stays_with_its_broker_until_that_refuses(cluster: Cluster) -> None:
    """E-07: another broker does not know what was stored; after silence only who says so risks that."""
    producer = cluster.producer
    ids = {broker: next(str(n) for n in range(100) if home(cluster, str(n)) == broker) for broker in ("a", "b")}
    assert {producer.send("orders", b"x", dedupe_id=ids["a"]).queue.broker_name for _ in range(6)} == {"a"}
    cluster.script(failing(Response.SYSTEM_ERROR), "a")
    assert producer.send("orders", b"x", dedupe_id=ids["a"]).queue.broker_name == "b"

    def hang_up(request: RemotingCommand) -> None:
        cluster.brokers["a"].hang_up()

    cluster.script(hang_up, "a")
    before = cluster.sends()
    with pytest.raises(SendFailed):
        producer.send("orders", b"x", dedupe_id=ids["a"])
    assert cluster.sends() == [before[0] + 3, before[1]]
    assert producer.send("orders", b"x", dedupe_id=ids["a"], or_elsewhere=True).queue.broker_name == "b"
    with pytest.raises(BadRequest):
        producer.send("orders", b"x", dedupe_id="")


def home(cluster: Cluster, ident: str) -> str:
    """Return the broker to which an id goes."""
    return cluster.producer.send("orders", b"x", dedupe_id=ident).queue.broker_name


def sending_to(*names: str, replies: Sequence[ClientError]) -> list[float]:
    """The pauses between the tries of a send whose brokers fail so, one after the other."""
    route = route_to(dict.fromkeys(names, "127.0.0.1:9"))
    with FakeRemoting(get_routeinfo_by_topic=route) as registry, connect(registry.address, timeout_s=TIMEOUT_S) as client:
        assert {queue.broker_name for queue in client.producer().queues("orders")} == set(names)
        choice = QueueChoice(client._core.routes, BrokerHealth())
        sending = Sending(Outgoing("orders", {}, b"", SEND, ("id",), None), choice, time.monotonic() + TIMEOUT_S)
        pauses = []
        for error in replies:
            assert sending.attempt() is not None
            assert sending.took(error) is None
            pauses.append(sending.pause_s)
    return pauses


def test_who_cannot_be_reached_is_tried_over_the_whole_time() -> None:
    """SG-134, P10: nothing was sent, so no try counts; the pauses grow to a second, and half of each is chance."""
    pauses = sending_to("a", replies=[NotConnected("away")] * 12)
    for number, pause in enumerate(pauses):
        most = min(1.0, 0.1 * 2**number)
        assert most / 2 <= pause <= most
    assert len(set(pauses)) == len(pauses)


def test_all_brokers_are_tried_before_the_first_pause() -> None:
    """SG-134: each of them once; only then, and whenever one of them is met again, there is a pause."""
    first, second, *later = sending_to("a", "b", replies=[NotConnected("away")] * 6)
    assert (first, second) == (0.0, 0.0)
    assert min(later) > 0.0


def test_what_a_broker_may_have_got_is_sent_three_times_at_most() -> None:
    """SG-134: whatever else happens between; each of these may have been stored."""
    lost, away = ConnectionFailed("the connection is lost"), NotConnected("away")
    with pytest.raises(SendFailed, match=r"in 7 tries, the last 3: a: away; a: away; a: the connection is lost"):
        sending_to("a", replies=[lost, away, lost, away, away, away, lost])


def test_what_every_broker_would_refuse_is_refused_at_once(cluster: Cluster) -> None:
    """SG-134: an illegal message is not tried again."""
    cluster.script(failing(Response.MESSAGE_ILLEGAL, "too long"))
    with pytest.raises(Refused, match="refused: too long"):
        cluster.producer.send("orders", b"x")
    assert sum(cluster.sends()) == 1


def test_busy_brokers_say_when_to_come_again(cluster: Cluster) -> None:
    """P10: the broker's own estimate reaches the caller."""
    cluster.script(failing(2, "64 sends wait for the disk; retry after 40 ms"))
    with pytest.raises(BrokerBusy) as busy:
        cluster.producer.send("orders", b"x")
    assert (busy.value.retry_after_s, busy.value.retriable) == (0.04, True)
    assert sum(cluster.sends()) == 3


def test_an_asynchronous_send_makes_the_same_tries(cluster: Cluster) -> None:
    """SG-127, SG-134: the future fails with what a blocking send raises."""
    cluster.script(failing(1), "a")
    futures = [cluster.producer.send_async("orders", b"x") for _ in range(4)]
    assert {future.result(TIMEOUT_S).queue.broker_name for future in futures} == {"b"}
    cluster.script(failing(1))
    assert isinstance(cluster.producer.send_async("orders", b"x").exception(TIMEOUT_S), Refused)
    cluster.script(silent)
    assert isinstance(cluster.producer.send_async("orders", b"x", timeout_s=0.1).exception(TIMEOUT_S), RequestTimeout)


@pytest.mark.parametrize("status", list(SendStatus))
def test_the_status_says_how_safe_the_message_is(cluster: Cluster, status: SendStatus) -> None:
    """SG-126, SG-138: any of them means stored; it is not sent again."""
    cluster.script(lambda request: accept(request)._replace(code=status.value))
    assert cluster.producer.send("orders", b"x").status is status
    assert sum(cluster.sends()) == 1


def test_an_ordering_key_stays_with_its_broker(cluster: Cluster) -> None:
    """SG-124, SG-138: another partition would break the order, so the tries go to the same one."""
    broker_name = cluster.producer.send("orders", b"x", ordering_key="k").queue.broker_name
    cluster.script(failing(1), broker_name)
    with pytest.raises(Refused):
        cluster.producer.send("orders", b"x", ordering_key="k")
    assert cluster.brokers[broker_name].count(SEND) == 4
    assert sum(cluster.sends()) == 4


def test_round_robin_over_brokers(cluster: Cluster) -> None:
    """SG-117, RD-015: every partition of every broker in turn; the route is asked once."""
    found = [cluster.producer.send("orders", b"x").queue for _ in range(8)]
    assert sorted(set(found)) == sorted(found[:4]) == sorted(found[4:])
    assert cluster.registry.count(Request.GET_ROUTEINFO_BY_TOPIC) == 1


def twice(request: RemotingCommand) -> Reply:
    """Take a batch of two."""
    taken = accept(request)
    return taken._replace(fields={**(taken.fields or {}), "msgId": "AB,CD"})


def test_what_was_sent_is_logged_with_its_keys_and_never_what_it_holds(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """SG-133: topic, keys and result, whichever way it was sent; no body, no password, and no property but the keys."""
    secrets = ["hidden-body", "hidden-password", "hidden-property"]
    body, properties = b"hidden-body" * 1000, {"card": "hidden-property"}
    with (
        caplog.at_level(logging.DEBUG),
        connect(cluster.registry.address, timeout_s=TIMEOUT_S, user="desk", password="hidden-password") as client,
        client.transaction_producer("box", lambda *given: Outcome.COMMIT, check=lambda half: Outcome.COMMIT) as transactions,
    ):
        for broker in cluster.brokers.values():
            broker.scripts[Request.SEND_BATCH_MESSAGE] = twice
        producer = client.producer()
        sent = [producer.send("orders", body, keys=["key-1", "key-2"], tag="paid", properties=properties)]
        sent.append(producer.send_async("orders", body, keys="key-3", properties=properties).result(TIMEOUT_S))
        sent += producer.send_batch("orders", [OutgoingMessage(b"hidden-body", keys="key-4", properties=properties)] * 2)
        sent.append(transactions.send("orders", body, keys="key-5", properties=properties).sent)
        producer.send_oneway("orders", body, properties=properties)
        cluster.script(failing(Response.MESSAGE_ILLEGAL, "too long"))
        with pytest.raises(Refused):
            producer.send("orders", body, properties=properties)
        with pytest.raises(BadRequest):
            producer.send("orders", [body])  # type: ignore[arg-type]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("metaq")]
    told = [line for line in lines if line.startswith("sent topic=orders keys=(")]
    assert len(told) == 4
    for result in sent:
        assert any(result.id in line and result.offset_id in line for line in told)
    for number in range(1, 6):
        assert any(f"'key-{number}'" in line for line in told)
    everything = "".join(map(logging.Formatter().format, caplog.records)) + repr([record.args for record in caplog.records])
    assert [secret for secret in secrets if secret in everything] == []


# -- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("took_s", "isolated_s"), [(0.01, 0), (0.549, 0), (0.55, 30), (0.99, 30), (1.0, 60), (2.0, 120), (3.0, 180)]
)
def test_a_slow_broker_is_passed_over_for_a_while(took_s: float, isolated_s: float) -> None:
    """RD-103: 30 s after 550 ms, 60 s after 1 s."""
    health = BrokerHealth()
    health.took("a", took_s, 100.0)
    assert health.is_available("a", 100.0 + isolated_s)
    assert health.is_available("a", 100.0 + isolated_s - 0.1) is (isolated_s == 0)
    assert health.is_available("b", 100.0)


def test_a_quick_answer_brings_a_broker_back() -> None:
    """RD-103: also one that failed."""
    health = BrokerHealth()
    health.failed("a", 100.0)
    assert not health.is_available("a", 101.0)
    assert health.available_at("a") > 101.0
    health.took("a", 0.001, 101.0)
    assert health.is_available("a", 101.0)


def test_sends_pass_over_a_slow_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """RD-103, SG-117: what a send took decides where the next ones go, until the time of the slow broker is over."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    queues = tuple(MessageQueue("orders", name, number) for name in ("a", "b") for number in range(2))
    routes: Any = SimpleNamespace(writable=lambda topic, deadline: queues, address=lambda name: f"{name}:1")
    choice = QueueChoice(routes, BrokerHealth())
    outgoing = Outgoing("orders", {}, b"", SEND, ("id",), None)

    def chosen(count: int, slow: str = "") -> str:
        """The brokers of so many sends; those of a slow one take 0.6 s."""
        names = ""
        for _ in range(count):
            one = Sending(outgoing, choice, clock[0] + TIMEOUT_S)
            attempt = one.attempt()
            assert attempt is not None
            clock[0] += 0.6 if attempt.queue.broker_name == slow else 0.001
            fields = {"msgId": "AB" * 16, "queueId": "0", "queueOffset": "7"}
            assert one.took(RemotingCommand(0, 1, 1, fields, b"", None, "JAVA", 0, 0)) is not None
            names += attempt.queue.broker_name
        return names

    assert sorted(chosen(4)) == ["a", "a", "b", "b"]
    assert chosen(4, slow="a").count("a") == 1
    clock[0] += 29.0
    assert chosen(8) == "b" * 8
    clock[0] += 1.0
    assert sorted(chosen(4)) == ["a", "a", "b", "b"]


# -- routes -----------------------------------------------------------------------------------------------------------


def no_route(client: Client) -> RouteNotFound:
    with pytest.raises(RouteNotFound) as error:
        client.producer().send("orders", b"x")
    return error.value


def test_no_registry_answers() -> None:
    """P14: the error names every address, and what the system said of it."""
    with FakeRemoting() as one, FakeRemoting() as other:
        addresses = [one.address, other.address]
    with connect(";".join(addresses)) as client:
        error = no_route(client)
    assert error.reason is RouteProblem.REGISTRY_UNREACHABLE
    assert error.retriable
    for address in addresses:
        assert f"cannot connect to {address}: Connection refused" in str(error)


def test_the_next_registry_is_asked() -> None:
    """SG-116: one registry at a time; when it fails, another one."""
    with FakeRemoting() as gone:
        dead = gone.address
    with FakeRemoting(send_message_v2=accept) as broker, FakeRemoting() as registry:
        registry.scripts[Request.GET_ROUTEINFO_BY_TOPIC] = route_to({"a": broker.address})
        for _ in range(4):  # which one is asked first is chance
            with connect(f"{dead};{registry.address}") as client:
                client.producer().send("orders", b"x")
    assert registry.count(Request.GET_ROUTEINFO_BY_TOPIC) == 4


def test_a_topic_that_nobody_creates() -> None:
    """P14: absent, and no template to create it from."""
    with FakeRemoting(get_routeinfo_by_topic=failing(17)) as registry, connect(registry.address) as client:
        error = no_route(client)
    assert error.reason is RouteProblem.TOPIC_ABSENT
    assert not error.retriable
    assert [request.fields["topic"] for request in registry.requests] == ["orders", "TBW102"]


def routed(permission: int, addresses: dict[int, str]) -> Script:
    route = TopicRoute((QueueData("a", 4, 4, permission),), (BrokerData("c", "a", addresses),))
    return lambda request: Reply(body=encode_route(route))


@pytest.mark.slow
def test_a_topic_without_a_live_master() -> None:
    """P14, SG-083: a replica alone takes no messages."""
    script = routed(6, {1: "127.0.0.1:9"})
    with FakeRemoting(get_routeinfo_by_topic=script) as registry, connect(registry.address) as client:
        error = no_route(client)
    assert error.reason is RouteProblem.NO_LIVE_MASTER
    assert error.retriable


def test_the_last_look_for_a_master_comes_too_late() -> None:
    """SG-138, P14: what was waited for is told, not that the time was too short to ask for a route once more."""
    reasons = iter([RouteProblem.NO_LIVE_MASTER, RouteProblem.REGISTRY_UNREACHABLE])

    def writable(topic: str, deadline: float) -> None:
        reason = next(reasons)
        if reason is RouteProblem.REGISTRY_UNREACHABLE:
            sending.deadline = time.monotonic()
        raise RouteNotFound("orders", reason, "")

    routes: Any = SimpleNamespace(writable=writable)
    outgoing = Outgoing("orders", {}, b"", SEND, (), None)
    sending = Sending(outgoing, QueueChoice(routes, BrokerHealth()), time.monotonic() + TIMEOUT_S)
    assert sending.attempt() is None
    with pytest.raises(RouteNotFound) as caught:
        sending.attempt()
    assert caught.value.reason is RouteProblem.NO_LIVE_MASTER


def test_a_topic_that_may_not_be_written() -> None:
    """P14, SG-139: and the permission that it has."""
    script = routed(READ, {0: "127.0.0.1:9"})
    with FakeRemoting(get_routeinfo_by_topic=script) as registry, connect(registry.address) as client:
        error = no_route(client)
    assert error.reason is RouteProblem.NO_PERMISSION
    assert "a has 4" in str(error)


def test_something_else_listens_where_the_registry_should() -> None:
    """P14: said as such."""
    script: Script = lambda request: Reply(body=b"[]")  # noqa: E731
    with FakeRemoting(get_routeinfo_by_topic=script) as registry, connect(registry.address) as client:
        error = no_route(client)
    assert "is not from a registry" in str(error)


def test_a_new_topic_is_sent_to_the_brokers_of_the_template() -> None:
    """SG-125, SG-065: at most four partitions of each broker that creates topics; then the topic's own route is used."""
    with FakeRemoting(send_message_v2=accept) as broker, FakeRemoting() as registry:
        template = TopicRoute((QueueData("a", 8, 8, 7),), (BrokerData("c", "a", {0: broker.address}),))

        def answer(request: RemotingCommand) -> Reply:
            return Reply(body=encode_route(template)) if request.fields["topic"] == "TBW102" else Reply(17)

        registry.scripts[Request.GET_ROUTEINFO_BY_TOPIC] = answer
        with connect(registry.address) as client:
            producer = client.producer()
            assert {producer.send("orders", b"x").queue.partition for _ in range(8)} == {0, 1, 2, 3}
        fields = broker.requests[-1].fields if broker.requests[-1].code == SEND else broker.requests[-2].fields
    assert (fields["b"], fields["c"], fields["d"]) == ("orders", "TBW102", "4")


def test_a_broker_that_has_moved_is_found(cluster: Cluster) -> None:
    """SG-116, RD-015: a topic that a broker does not have any more is asked for again."""
    cluster.producer.send("orders", b"x")
    cluster.script(failing(17))
    with FakeRemoting(send_message_v2=accept) as moved:
        cluster.registry.scripts[Request.GET_ROUTEINFO_BY_TOPIC] = route_to({"c": moved.address})
        assert cluster.producer.send("orders", b"x").queue.broker_name == "c"


def test_one_way_needs_a_connection() -> None:
    """SG-128: no answer is waited for, but a broker that is not there is told."""
    with FakeRemoting() as gone:
        address = gone.address
    with (
        FakeRemoting(get_routeinfo_by_topic=route_to({"a": address})) as registry,
        connect(registry.address) as client,
        pytest.raises(ConnectionFailed, match=f"cannot connect to {address}"),
    ):
        client.producer().send_oneway("orders", b"x")
