"""Sharing queues among the clients of a group: golden values, shares of the examples, and laws for any lists."""

import random
from collections import Counter
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.errors import ConfigError
from metaq.message import MessageQueue
from metaq.registry.assign import (
    STRATEGIES,
    Assign,
    _point,
    average,
    average_by_circle,
    broadcast,
    configured,
    consistent_hash,
    machine_room,
    machine_room_nearby,
    popped,
    pulled,
)

ROOMS: Final = ["east", "west", "north"]

client_ids = st.builds("192.0.2.{}@{}".format, st.integers(0, 30), st.sampled_from(["1", "2", "cons1"]))
client_lists = st.lists(client_ids, min_size=1, max_size=12)
broker_names = st.builds("{}@b{}".format, st.sampled_from(ROOMS), st.integers(0, 3)) | st.sampled_from(["plain", "a@b@c"])
queue_lists = st.lists(st.builds(MessageQueue, st.just("orders"), broker_names, st.integers(0, 20)), max_size=40)
seeds = st.integers(0, 1 << 32)


def room_of_broker(name: str) -> str:
    return name.partition("@")[0]


def room_of_client(client: str) -> str:
    return ROOMS[sum(client.encode()) % 3]


SHARING: Final[dict[str, Assign]] = {
    "average": average,
    "average_by_circle": average_by_circle,
    "consistent_hash": consistent_hash,
    "machine_room_nearby average": machine_room_nearby(average, room_of_broker, room_of_client),
    "machine_room_nearby consistent_hash": machine_room_nearby(consistent_hash, room_of_broker, room_of_client),
}
ALL: Final[dict[str, Assign]] = {**SHARING, "broadcast": broadcast, "machine_room": machine_room(["east", "west"])}


def queues_of(count: int, broker: str = "broker-a") -> list[MessageQueue]:
    return [MessageQueue("orders", broker, number) for number in range(count)]


def shares(assign: Assign, queues: list[MessageQueue], clients: list[str]) -> dict[str, list[int]]:
    return {client: [queue.partition for queue in assign(client, queues, clients)] for client in clients}


# -- known values -----------------------------------------------------------------------------------------------------


def test_points_of_the_ring() -> None:
    """SG-129: golden vector G38: a client's first point, and a queue's."""
    assert _point("192.0.2.2@cons1-0") == 877463258
    queue = MessageQueue("TopicA", "broker-a", 0)
    assert str(queue) == "MessageQueue [topic=TopicA, brokerName=broker-a, queueId=0]"
    assert _point(str(queue)) == 1888944553


def test_average_gives_blocks() -> None:
    """SG-129: 24 queues for two are 12 and 12; what is over goes to the first; who is too many gets none."""
    assert shares(average, queues_of(24), ["b", "a"]) == {"a": [*range(12)], "b": [*range(12, 24)]}
    assert shares(average, queues_of(8), ["a", "b", "c"]) == {"a": [0, 1, 2], "b": [3, 4, 5], "c": [6, 7]}
    assert shares(average, queues_of(7), ["a", "b", "c"]) == {"a": [0, 1, 2], "b": [3, 4], "c": [5, 6]}
    assert shares(average, queues_of(2), ["a", "b", "c"]) == {"a": [0], "b": [1], "c": []}


def test_average_by_circle_deals() -> None:
    """SG-129: as cards."""
    assert shares(average_by_circle, queues_of(7), ["a", "b", "c"]) == {"a": [0, 3, 6], "b": [1, 4], "c": [2, 5]}
    assert shares(average_by_circle, queues_of(2), ["a", "b", "c"]) == {"a": [0], "b": [1], "c": []}


def test_queues_are_sorted_by_broker_then_number() -> None:
    """SG-129: numbers as numbers, not as text."""
    queues = [MessageQueue("orders", broker, number) for broker in ("b", "a") for number in (10, 9)]
    assert average("one", queues, ["one", "two"]) == [MessageQueue("orders", "a", 9), MessageQueue("orders", "a", 10)]


def test_machine_room_gives_blocks_and_then_the_rest() -> None:
    """SG-129: eleven queues of listed rooms for three: blocks of three, the two at the end one by one."""
    queues = queues_of(11, "east@a") + queues_of(3, "north@a") + queues_of(3, "plain") + queues_of(3, "east@a@b")
    expected = {"a": [0, 1, 2, 9], "b": [3, 4, 5, 10], "c": [6, 7, 8]}
    assert shares(machine_room(["east", "west"]), queues, ["c", "b", "a"]) == expected


def test_machine_room_nearby_stays_in_the_room() -> None:
    """SG-129: each room for its own clients, a room without clients for all."""
    queues = queues_of(4, "east@a") + queues_of(2, "west@a") + queues_of(3, "north@a")
    clients = ["east-1", "east-2", "west-1"]
    assign = machine_room_nearby(average, room_of_broker, lambda client: client.partition("-")[0])
    assert {client: [str(q.broker_name) + str(q.partition) for q in assign(client, queues, clients)] for client in clients} == {
        "east-1": ["east@a0", "east@a1", "north@a0"],
        "east-2": ["east@a2", "east@a3", "north@a1"],
        "west-1": ["north@a2", "west@a0", "west@a1"],
    }


def test_machine_room_nearby_needs_a_room_for_everybody() -> None:
    """SG-129: otherwise a queue would have no owner."""
    assign = machine_room_nearby(average, room_of_broker, lambda client: "")
    with pytest.raises(ConfigError, match="client a is in no machine room"):
        assign("a", queues_of(1, "east@a"), ["a"])


def test_configured_is_what_it_was_told() -> None:
    """SG-129: whoever asks."""
    assign = configured(queues_of(2)[::-1])
    assert assign("nobody", queues_of(5), ["a"]) == queues_of(2)


# -- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARING)
@given(queues=queue_lists, clients=client_lists)
def test_every_queue_has_one_owner(name: str, queues: list[MessageQueue], clients: list[str]) -> None:
    """SG-129, MY-010: none is forgotten, none is consumed twice."""
    owners = Counter(queue for client in set(clients) for queue in SHARING[name](client, queues, clients))
    assert owners == Counter(set(queues))


@given(queues=queue_lists, clients=client_lists)
def test_a_machine_room_shares_its_own_queues(queues: list[MessageQueue], clients: list[str]) -> None:
    """SG-129: one owner for each queue of a listed room, none for others, and nobody has two more than another."""
    own = {client: machine_room(["east", "west"])(client, queues, clients) for client in clients}
    listed = {queue for queue in queues if room_of_broker(queue.broker_name) in ("east", "west")}
    assert Counter(queue for share in own.values() for queue in share) == Counter(listed)
    sizes = [len(share) for share in own.values()]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("assign", [average, average_by_circle])
@given(queues=queue_lists, clients=client_lists)
def test_averages_are_balanced(assign: Assign, queues: list[MessageQueue], clients: list[str]) -> None:
    """SG-129, MY-010: nobody has two more than another."""
    sizes = [len(assign(client, queues, clients)) for client in clients]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", ALL)
@given(queues=queue_lists, clients=client_lists, seed=seeds)
def test_the_order_of_the_lists_does_not_matter(name: str, queues: list[MessageQueue], clients: list[str], seed: int) -> None:
    """SG-129: nor do doubles; a share is sorted."""
    chance = random.Random(seed)
    other_queues = chance.sample(queues, len(queues)) + queues[:2]
    other_clients = chance.sample(clients, len(clients)) + clients[:1]
    for client in clients:
        assert ALL[name](client, queues, clients) == ALL[name](client, other_queues, other_clients), seed
        assert ALL[name](client, queues, clients) == sorted(ALL[name](client, queues, clients))


@pytest.mark.parametrize("name", ALL)
@given(queues=queue_lists, clients=client_lists)
def test_a_stranger_gets_nothing(name: str, queues: list[MessageQueue], clients: list[str]) -> None:
    """SG-129: a client that the group does not know yet waits; without clients nobody gets anything."""
    assert ALL[name]("stranger", queues, clients) == []
    assert ALL[name]("stranger", queues, []) == []


@given(queues=queue_lists, clients=client_lists)
def test_broadcast_gives_everything_to_everybody(queues: list[MessageQueue], clients: list[str]) -> None:
    """SG-129: no sharing."""
    for client in clients:
        assert broadcast(client, queues, clients) == sorted(set(queues))


@given(queues=queue_lists, clients=client_lists, other=client_ids)
def test_a_newcomer_takes_queues_and_moves_no_others(queues: list[MessageQueue], clients: list[str], other: str) -> None:
    """SG-129: of consistent hashing: what a member has afterwards it had before."""
    for client in set(clients) - {other}:
        after = consistent_hash(client, queues, [*clients, other])
        assert set(after) <= set(consistent_hash(client, queues, clients))


# -- shares that a broker computes ------------------------------------------------------------------------------------

NAMED: Final[dict[str, Assign]] = {
    "AVG": average,
    "AVG_BY_CIRCLE": average_by_circle,
    "CONSISTENT_HASH": consistent_hash,
}


def partitions_popped(client: str, count: int, clients: list[str], followers: int) -> list[int]:
    return [queue.partition for queue in popped("AVG", client, queues_of(count), clients, followers) or ()]


@pytest.mark.parametrize("name", STRATEGIES)
@given(queue_lists, client_lists)
def test_a_broker_shares_as_clients_do(name: str, queues: list[MessageQueue], clients: list[str]) -> None:
    """MY-010: A-1: the same share as the client computes; disjoint, complete, and even unless it is a ring."""
    shares = {client: pulled(name, client, queues, clients) for client in clients}
    assert shares == {client: NAMED[name](client, queues, clients) for client in clients}
    found = [queue for client in set(clients) for queue in shares[client] or ()]
    assert sorted(found) == sorted(set(queues))
    if name != "CONSISTENT_HASH":
        sizes = [len(share or ()) for share in shares.values()]
        assert max(sizes) - min(sizes) <= 1


def test_a_stranger_has_no_share() -> None:
    """Not an empty one: that would take its queues away before its heartbeat has come."""
    assert pulled("AVG", "x", queues_of(4), ["a", "b"]) is None
    assert popped("AVG", "x", queues_of(4), ["a", "b"], 0) is None


@pytest.mark.parametrize(("followers", "clients"), [(0, "abc"), (-1, "abc"), (2, "abc"), (9, "abc"), (0, "a"), (1, "ab")])
def test_all_pop_everything(followers: int, clients: str) -> None:
    """MY-010: one entry a broker, with the queue -1."""
    queues = queues_of(3) + queues_of(2, "broker-b")
    everything = [MessageQueue("orders", "broker-a", -1), MessageQueue("orders", "broker-b", -1)]
    for client in clients:
        assert popped("AVG", client, queues, list(clients), followers) == everything


def test_members_pop_the_queues_of_those_after_them() -> None:
    """MY-010: around the end of the list."""
    clients = ["c", "a", "d", "b"]
    assert partitions_popped("a", 8, clients, 1) == [0, 1, 2, 3]
    assert partitions_popped("c", 8, clients, 1) == [4, 5, 6, 7]
    assert partitions_popped("d", 8, clients, 1) == [0, 1, 6, 7]
    assert partitions_popped("d", 8, clients, 2) == [0, 1, 2, 3, 6, 7]


def test_more_members_than_queues_share_them() -> None:
    """MY-013: nobody idles."""
    clients = ["a", "b", "c", "d", "e"]
    assert [partitions_popped(client, 2, clients, 1) for client in clients] == [[0], [1], [0], [1], [0]]
    assert popped("AVG", "a", [], clients, 1) == []


@given(queue_lists, client_lists, st.integers(1, 12), st.sampled_from(sorted(STRATEGIES)))
def test_every_queue_has_as_many_poppers(queues: list[MessageQueue], clients: list[str], followers: int, name: str) -> None:
    """MY-010: its owner and the members before it; no member gets a queue twice."""
    members, wanted = set(clients), set(queues)
    shares = [popped(name, client, queues, clients, followers) or [] for client in members]
    assert all(len(set(share)) == len(share) and share == sorted(share) for share in shares)
    if followers < len(members) - 1 and len(members) <= len(wanted):
        assert Counter(queue for share in shares for queue in share) == dict.fromkeys(wanted, followers + 1)
