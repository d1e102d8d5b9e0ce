"""Assignment by the broker: the handler alone, in the process of the test, and two brokers with one registry."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.engine.duties import Duties
from metaq.engine.leases.draining import Drain
from metaq.engine.leases.leasing import Leasing
from metaq.engine.tables.modes import MODES, ModeTable
from metaq.engine.tables.topics import Topic
from metaq.errors import ConnectionFailed, MetaqError, UnknownTopic
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import READ, WRITE, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import DeleteGroup, TopicOnly
from metaq.protocol.remoting.routes import QueueData, TopicRoute
from metaq.server.access.permissions import ANYBODY, Grants, Permission, Principal
from metaq.server.remoting.admin.groups import GroupAdminHandler
from metaq.server.remoting.admin.topics import TopicsHandler
from metaq.server.remoting.consuming.assignment import AssignmentHandler
from metaq.server.remoting.consuming.heartbeat import HeartbeatHandler
from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import run_here
from tests.support.admin import ask, ask_body, connect, create_topic
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.inprocess import Parts, Remoting
from tests.support.remoting import RemotingClient

TOPIC: Final = "orders"
GROUP: Final = "billing"
DEADLINE_S: Final = 30.0
NULL: Final = {"messageQueueAssignments": None}


class Registries:
    """What the registries know; a topic that is not ``at_hand`` has to be asked for."""

    def __init__(self) -> None:
        self.routes: dict[str, TopicRoute | MetaqError] = {}
        self.at_hand = True
        self.fetched = 0

    def known(self, topic: str) -> TopicRoute | None:
        return self._answer(topic) if self.at_hand else None

    def fetch(self, topic: str) -> TopicRoute:
        self.fetched += 1
        return self._answer(topic)

    def _answer(self, topic: str) -> TopicRoute:
        found = self.routes.get(topic, UnknownTopic("nowhere"))
        if isinstance(found, MetaqError):
            raise found
        return found


class Broker:
    """A broker ``b`` with the topic, of two partitions, and another one ``c`` that the registries know, with three."""

    def __init__(self, data: Path) -> None:
        self.parts = parts = Parts(data, topics={TOPIC: {"partitions": 2}}, broker_name="b")
        self.registries = Registries()
        self.registries.routes[TOPIC] = route(c=3)
        self.gone_groups: list[str] = []
        """The groups about whose pops nothing is to be kept any more."""
        duties = Duties(parts.context, parts.turns, run_here)
        leasing = Leasing.open(parts.context, parts.turns, parts.loop.timer)
        drain = Drain(parts.context, leasing.leases, leasing.moves, run_here)
        handlers = (
            AssignmentHandler(parts.context, duties, drain, parts.later, self.registries),
            HeartbeatHandler(parts.context, leasing.lines),
            GroupAdminHandler(parts.context, duties, parts.later, self.gone_groups.append),
            TopicsHandler(
                parts.context, duties, parts.later, lambda name: parts.context.modes.forget(topic=name), lambda: None
            ),
        )
        for handler in handlers:
            parts.endpoint.answer(handler.requests())
        self.members = {name: self.join(name) for name in ("m1", "m2")}

    def join(self, name: str) -> Remoting:
        client = Remoting(self.parts)
        client.send(Request.HEART_BEAT, body=beat(name))
        assert any(frame.is_response and not frame.code for frame in client.answers())
        return client

    def call(
        self, code: int, header: tuple[Any, ...] = (), body: object = None, *, who: Principal = ANYBODY
    ) -> RemotingCommand:
        """The answer to a request, at once or after the work that it waits for."""
        client = Remoting(self.parts)
        client._session.principal = who
        client.send(code, header, b"" if body is None else json.dumps(body).encode())
        for _ in range(20):
            self.parts.end_turn()
            answers = client.answers()
            if answers:
                return answers[0]
        raise AssertionError(f"no answer to {code}")

    def set_mode(self, mode: str = "POP", share: int = 0, **row: object) -> RemotingCommand:
        body = {"topic": TOPIC, "consumerGroup": GROUP, "mode": mode, "popShareQueueNum": share, **row}
        return self.call(Request.SET_MESSAGE_REQUEST_MODE, body=body)

    def assignments(self, client_id: str = "m1", **query: object) -> Any:
        """The body of the answer to 400."""
        answer = self.call(Request.QUERY_ASSIGNMENT, body=query_of(client_id, **query))
        assert answer.code == Response.SUCCESS, answer.remark
        return json.loads(answer.body)

    def assigned(self, client_id: str = "m1", **query: object) -> tuple[set[str], list[str]]:
        """The modes that the client gets, and its queues."""
        return modes_and_queues(self.assignments(client_id, **query))


def route(**counts: int) -> TopicRoute:
    return TopicRoute(tuple(QueueData(name, count, count, READ | WRITE) for name, count in counts.items()), ())


def beat(client_id: str, group: str = GROUP) -> bytes:
    subscription = {"topic": TOPIC, "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    consumer: dict[str, Any] = {"groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
    consumer |= {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [subscription]}
    return fastjson.encode({"clientID": client_id, "consumerDataSet": [consumer], "producerDataSet": []})


def query_of(client_id: str, **query: object) -> dict[str, object]:
    body = {"topic": TOPIC, "consumerGroup": GROUP, "clientId": client_id, "strategyName": "AVG"}
    return {**body, "messageModel": "CLUSTERING", **query}


def modes_and_queues(body: Any) -> tuple[set[str], list[str]]:
    rows = body["messageQueueAssignments"]
    queues = [row["messageQueue"] for row in rows]
    assert all(row["attachments"] is None for row in rows)
    return {row["mode"] for row in rows}, [f"{queue['brokerName']}{queue['queueId']}" for queue in queues]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "data")
    yield broker
    broker.parts.close()


# -- modes ------------------------------------------------------------------------------------------------------------


def test_a_mode_is_durable_before_it_is_confirmed(broker: Broker) -> None:
    """MY-010: 401, as mqadmin setConsumeMode sends it; 402 has the table as RocketMQ's slaves read it."""
    assert broker.set_mode("POP", 8).code == 0
    saved = ModeTable(broker.parts.settings.data)
    assert saved.load(RealDisk()) == []
    assert (saved.get(TOPIC, GROUP).mode, saved.get(TOPIC, GROUP).pop_share) == ("POP", 8)
    row = {"topic": TOPIC, "consumerGroup": GROUP, "mode": "POP", "popShareQueueNum": 8}
    table = json.loads(broker.call(Request.GET_ALL_MESSAGE_REQUEST_MODE).body)
    assert table == {"messageRequestModeMap": {TOPIC: {GROUP: row}}}


def test_a_start_knows_the_modes(broker: Broker) -> None:
    """MY-010: they are loaded with the other tables."""
    broker.set_mode("POP", 8)
    broker.parts.close()
    again = Parts(broker.parts.settings.data, broker_name="b")
    assert again.context.modes.get(TOPIC, GROUP).pop_share == 8
    again.close()
    broker.parts = again


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"topic": "unknown"}, Response.TOPIC_NOT_EXIST),
        ({"consumerGroup": "unknown"}, Response.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"topic": f"%RETRY%{GROUP}"}, Response.NO_PERMISSION),
        ({"mode": "PUSH"}, Response.SYSTEM_ERROR),
        ({"topic": None}, Response.SYSTEM_ERROR),
        ({"popShareQueueNum": "8"}, Response.SYSTEM_ERROR),
    ],
)
def test_refused_modes(broker: Broker, wrong: dict[str, Any], code: int) -> None:
    """MY-010: nothing is set, and the remark says why."""
    answer = broker.set_mode(**wrong)
    assert answer.code == code and answer.remark
    assert len(broker.parts.context.modes) == 0


@pytest.mark.parametrize("code", [Request.QUERY_ASSIGNMENT, Request.SET_MESSAGE_REQUEST_MODE])
@pytest.mark.parametrize("body", [None, [], 7, {"topic": {}}])
def test_bodies_that_cannot_be_read(broker: Broker, code: int, body: object) -> None:
    """1, as for all such requests."""
    assert broker.call(code, body=body).code == Response.SYSTEM_ERROR


def test_deleted_groups_and_topics_have_no_mode(broker: Broker) -> None:
    """MY-010: nor after the next start."""
    assert broker.set_mode().code == 0
    assert broker.call(Request.DELETE_SUBSCRIPTIONGROUP, DeleteGroup(GROUP)).code == 0
    assert broker.gone_groups == [GROUP]
    assert len(broker.parts.context.modes) == 0
    broker.join("m3")
    assert broker.set_mode().code == 0
    assert broker.call(Request.DELETE_TOPIC_IN_BROKER, TopicOnly(TOPIC)).code == 0
    assert b'"messageRequestModeMap":{}' in (broker.parts.settings.data / "config" / MODES).read_bytes()


# -- queues -----------------------------------------------------------------------------------------------------------


def test_queues_of_all_brokers_are_shared_out(broker: Broker) -> None:
    """MY-010, MY-012, MY-021: whichever broker is asked; pulled unless something else was set."""
    assert broker.assigned("m1") == ({"PULL"}, ["b0", "b1", "c0"])
    assert broker.assigned("m2") == ({"PULL"}, ["c1", "c2"])
    assert broker.assigned("m2", strategyName="AVG_BY_CIRCLE") == ({"PULL"}, ["b1", "c1"])


def test_members_come_and_go(broker: Broker) -> None:
    """MY-010, MY-013: each has its share of what there is now, and no more members than queues have one."""
    for number in range(3, 8):
        broker.join(f"m{number}")
    shares = [broker.assignments(f"m{number}")["messageQueueAssignments"] for number in range(1, 8)]
    assert [len(share) for share in shares] == [1, 1, 1, 1, 1, 0, 0]


def test_popping(broker: Broker) -> None:
    """MY-010, MY-013: everything, or with the queues of those that follow."""
    assert broker.set_mode("POP", 0).code == 0
    assert broker.assigned("m1") == ({"POP"}, ["b-1", "c-1"])
    for number in range(3, 6):
        broker.join(f"m{number}")
    broker.set_mode("POP", 1)
    assert broker.assigned("m1") == ({"POP"}, ["b0", "b1"])
    assert broker.assigned("m5") == ({"POP"}, ["b0", "c2"])
    broker.join("m6")
    assert broker.assigned("m6") == ({"POP"}, ["b0"])
    broker.set_mode("PULL")
    assert broker.assigned("m5") == ({"PULL"}, ["c2"])


def test_broadcasting_clients_pull_everything(broker: Broker) -> None:
    """Members or not, and whatever the mode is."""
    broker.set_mode("POP")
    everything = ["b0", "b1", "c0", "c1", "c2"]
    assert broker.assigned("stranger", messageModel="BROADCASTING") == ({"PULL"}, everything)


def test_retry_topics_are_pulled(broker: Broker) -> None:
    """By AVG, whatever strategy the client names."""
    retry = f"%RETRY%{GROUP}"
    broker.registries.routes[retry] = route(c=1)
    assert broker.assigned("m1", topic=retry, strategyName="odd") == ({"PULL"}, ["b0"])
    assert broker.assigned("m2", topic=retry, strategyName="odd") == ({"PULL"}, ["c0"])


@pytest.mark.parametrize(
    "query",
    [{"client_id": "stranger"}, {"consumerGroup": "unknown"}, {"topic": "unknown"}, {"strategyName": "MACHINE_ROOM"},
     {"strategyName": None}],
)  # fmt: skip
def test_no_answer_is_null(broker: Broker, query: dict[str, Any]) -> None:
    """An empty list would take away all that the client has."""
    assert broker.assignments(**query) == NULL


@pytest.mark.parametrize(
    ("topics", "groups", "code"),
    [
        ({TOPIC: Permission.SUB}, {GROUP: Permission.SUB}, Response.SUCCESS),
        ({TOPIC: Permission.PUB}, {GROUP: Permission.SUB}, Response.NO_PERMISSION),
        ({TOPIC: Permission.SUB}, {"other": Permission.SUB}, Response.NO_PERMISSION),
    ],
)
def test_who_may_ask(broker: Broker, topics: Grants, groups: Grants, code: int) -> None:
    """E-05: whoever may pull the topic for the group."""
    who = Principal("reader")
    who.become(topics, groups, admin=False)
    assert broker.call(Request.QUERY_ASSIGNMENT, body=query_of("m1"), who=who).code == code


def test_own_changes_count_at_once(broker: Broker) -> None:
    """The registries may not know of them yet."""
    broker.registries.routes[TOPIC] = route(b=9, c=1)
    topics = broker.parts.context.topics
    topics.put(Topic(TOPIC, partitions=4, read_partitions=3))
    assert broker.assigned("x", messageModel="BROADCASTING")[1] == ["b0", "b1", "b2", "c0"]
    topics.put(Topic(TOPIC, partitions=4, read_partitions=3, permission=WRITE))
    assert broker.assigned("x", messageModel="BROADCASTING")[1] == ["c0"]
    topics.delete(TOPIC, {})
    assert broker.assigned("x", messageModel="BROADCASTING")[1] == ["c0"]
    broker.registries.routes[TOPIC] = TopicRoute((QueueData("c", 1, 1, WRITE),), ())
    assert broker.assignments("x", messageModel="BROADCASTING") == NULL


def test_registries_are_asked_first(broker: Broker) -> None:
    """A route that is not at hand; without an answer the client keeps what it has."""
    broker.registries.at_hand = False
    assert broker.assigned("m2") == ({"PULL"}, ["c1", "c2"])
    assert broker.registries.fetched == 1
    broker.registries.routes[TOPIC] = ConnectionFailed("gone")
    assert broker.assignments("m2") == NULL
    del broker.registries.routes[TOPIC]  # registries that have not heard of it yet
    assert broker.assigned("m2") == ({"PULL"}, ["b1"])


def test_a_broker_cannot_make_others_count_without_end(broker: Broker) -> None:
    """Queues in a route are bounded as those of a topic here."""
    broker.registries.routes[TOPIC] = route(c=1 << 30)
    assert len(broker.assigned("x", messageModel="BROADCASTING")[1]) == 2 + 1024


# -- two brokers ------------------------------------------------------------------------------------------------------


def shares(clients: Sequence[RemotingClient], members: Sequence[str]) -> list[list[list[str]]]:
    """The queues of each member, as each broker tells it."""

    def share(client: RemotingClient, member: str) -> list[str]:
        body = ask_body(client, Request.QUERY_ASSIGNMENT, fastjson.encode(query_of(member)))
        return [] if body == NULL else modes_and_queues(body)[1]

    return [[share(client, member) for member in members] for client in clients]


def test_two_brokers_answer_alike(tmp_path: Path) -> None:
    """MY-010, MY-012: each knows the queues of the other through the registry, and the members by their heartbeats."""
    with ExitStack() as stack:
        registry = stack.enter_context(RegistryProcess(tmp_path / "registry"))
        flags = (f"--registries={registry.address}",)
        brokers = [stack.enter_context(BrokerProcess(tmp_path / name, *flags, f"--broker-name={name}")) for name in ("b", "c")]
        clients = [stack.enter_context(connect(broker)) for broker in brokers]
        members = [[stack.enter_context(connect(broker)) for broker in brokers] for _ in range(2)]
        for client in clients:
            create_topic(client, TOPIC, write=2, read=2)
        for number, connections in enumerate(members, 1):
            for connection in connections:
                ask(connection, Request.HEART_BEAT, beat(f"m{number}"))
        expected = [[["b0", "b1"], ["c0", "c1"]]] * 2
        wait_until(lambda: shares(clients, ("m1", "m2")) == expected, DEADLINE_S, "both know all queues")
        create_topic(clients[0], TOPIC, write=4, read=4)
        assert shares(clients[:1], ("m1", "m2")) == [[["b0", "b1", "b2"], ["b3", "c0", "c1"]]]
        row = {"topic": TOPIC, "consumerGroup": GROUP, "mode": "POP", "popShareQueueNum": 0}
        ask(clients[0], Request.SET_MESSAGE_REQUEST_MODE, fastjson.encode(row))
        brokers[0].kill()
        brokers[0].start()
        with connect(brokers[0]) as client:
            table = ask_body(client, Request.GET_ALL_MESSAGE_REQUEST_MODE)
            assert table == {"messageRequestModeMap": {TOPIC: {GROUP: row}}}
