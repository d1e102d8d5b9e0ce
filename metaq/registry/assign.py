"""Assignment of a topic's queues to the clients of a group (specs: remoting protocol, section 5.6).

Each member of a group computes its own share from the same two lists, without a coordinator, so all must compute the same
result: the order of the lists does not matter, and duplicates count once. A client that is not in the list of clients gets
nothing.
"""

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeVar

from metaq.errors import ConfigError
from metaq.message import MessageQueue
from metaq.protocol.remoting.leases.pop import ALL_QUEUES

Assign = Callable[[str, Collection[MessageQueue], Collection[str]], list[MessageQueue]]
"""A function of a client's id, all queues and the ids of all clients of the group; it returns the client's queues, sorted."""

Deal = Callable[[Sequence[MessageQueue], Sequence[str]], Mapping[str, list[MessageQueue]]]
"""A function of all queues and all clients, both sorted and each once; it returns the queues of each client."""

Item = TypeVar("Item")

VIRTUAL_NODES: Final = 10
"""The number of points of each client on the ring of consistent hashing."""
KEPT: Final = 64
"""Divisions of queues among members that are remembered."""


def average(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """Return a block of adjacent queues (AVG): blocks are of equal size, or the first clients get one queue more."""
    ordered, index, count = _places(client, queues, clients)
    return [] if index is None else _block(ordered, index, count)


def average_by_circle(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """Return every n-th queue for n clients (AVG_BY_CIRCLE): queues are dealt out like cards."""
    ordered, index, count = _places(client, queues, clients)
    return [] if index is None else _cards(ordered, index, count)


def consistent_hash(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """Return the queues next to the client's points on a hash ring (CONSISTENT_HASH).

    A client that joins or leaves moves few queues, but the shares are uneven.
    """
    return _ring(_sorted(queues), sorted(set(clients))).get(client, [])


def broadcast(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """Return every queue, for every client of the group."""
    return _sorted(queues) if client in clients else []


def pulled(strategy: str, client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue] | None:
    """Return the client's queues by a strategy of this name, one of ``STRATEGIES``; ``None`` when it is not a member."""
    members = sorted(set(clients))
    return _dealt(strategy, tuple(_sorted(queues)), tuple(members)).get(client, []) if client in members else None


def popped(
    strategy: str, client: str, queues: Collection[MessageQueue], clients: Collection[str], followers: int
) -> list[MessageQueue] | None:
    """Return the queues that a client pops: its own, and those of so many ``followers`` after it in the list of clients.

    A partition of -1 stands for all queues of a broker: when ``followers`` is 0 or less, or all other clients follow, every
    client pops everything. When there are more clients than queues, several pop the same one. ``None`` when the client is not a
    member.
    """
    members, ordered = sorted(set(clients)), _sorted(queues)
    if client not in members:
        return None
    if followers <= 0 or followers >= len(members) - 1:
        return _sorted({queue._replace(partition=ALL_QUEUES) for queue in ordered})
    index = members.index(client)
    if len(members) > len(ordered):
        return [ordered[index % len(ordered)]] if ordered else []
    shares = _dealt(strategy, tuple(ordered), tuple(members))
    sharers = [members[(index + step) % len(members)] for step in range(followers + 1)]
    return _sorted([queue for member in sharers for queue in shares.get(member, ())])


def configured(own: Collection[MessageQueue]) -> Assign:
    """Return a function that always returns the queues ``own`` (CONFIG), whatever queues and clients there are."""
    fixed = _sorted(own)
    return lambda _client, _queues, _clients: list(fixed)


def machine_room(rooms: Collection[str]) -> Assign:
    """Return a function that shares out only the queues of brokers named ``room@name`` in one of ``rooms`` (MACHINE_ROOM)."""

    def assign(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
        inside = [queue for queue in queues if queue.broker_name.count("@") == 1 and _room(queue.broker_name) in rooms]
        ordered, index, count = _places(client, inside, clients)
        if index is None:
            return []
        size, rest = divmod(len(ordered), count)
        remainder = ordered[count * size :]
        return ordered[index * size : (index + 1) * size] + (remainder[index : index + 1] if index < rest else [])

    return assign


def machine_room_nearby(inner: Assign, room_of_broker: Callable[[str], str], room_of_client: Callable[[str], str]) -> Assign:
    """Return a function that shares the queues of a room among the clients of that room (MACHINE_ROOM_NEARBY).

    The queues of a room without clients are shared among all clients. The function raises ``ConfigError`` for a broker or a
    client whose room is unknown (empty).

    Args:
        inner: the strategy within a room.
        room_of_broker: returns the room of a broker, by its name.
        room_of_client: returns the room of a client, by its id.
    """

    def assign(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
        if client not in clients:
            return []
        members = _grouped(clients, lambda member: (room_of_client(member), f"client {member}"))
        own: list[MessageQueue] = []
        for room, inside in _grouped(queues, lambda queue: (room_of_broker(queue.broker_name), str(queue))).items():
            sharers = members.get(room, clients)
            if client in sharers:
                own += inner(client, inside, sharers)
        return _sorted(own)

    return assign


def _block(ordered: list[MessageQueue], index: int, count: int) -> list[MessageQueue]:
    size, rest = divmod(len(ordered), count)
    start = index * size + min(index, rest)
    return ordered[start : start + size + (index < rest)]


def _cards(ordered: list[MessageQueue], index: int, count: int) -> list[MessageQueue]:
    return ordered[index::count]


def _ring(ordered: Sequence[MessageQueue], members: Sequence[str]) -> dict[str, list[MessageQueue]]:
    """Return the queues of each member that has any, by consistent hashing."""
    ring: dict[int, str] = {}
    for member in members:
        # If two clients have the same point, the later one gets it, as in the Java client's map.
        ring |= {_point(f"{member}-{number}"): member for number in range(VIRTUAL_NODES)}
    points = sorted(ring)
    shares: dict[str, list[MessageQueue]] = defaultdict(list)
    for queue in ordered if points else ():
        shares[ring[_owner(points, _point(str(queue)))]].append(queue)
    return shares


def _each(share: Callable[[list[MessageQueue], int, int], list[MessageQueue]]) -> Deal:
    def deal(ordered: Sequence[MessageQueue], members: Sequence[str]) -> dict[str, list[MessageQueue]]:
        queues, count = list(ordered), len(members)
        return {member: share(queues, index, count) for index, member in enumerate(members)}

    return deal


@lru_cache(maxsize=KEPT)
def _dealt(strategy: str, ordered: tuple[MessageQueue, ...], members: tuple[str, ...]) -> Mapping[str, list[MessageQueue]]:
    """Return the share of each member. It is kept, since all members ask for the same one after the other."""
    return STRATEGIES[strategy](ordered, members)


def _sorted(queues: Collection[MessageQueue]) -> list[MessageQueue]:
    return sorted(set(queues))


def _places(
    client: str, queues: Collection[MessageQueue], clients: Collection[str]
) -> tuple[list[MessageQueue], int | None, int]:
    """Return the sorted queues, the client's index among the sorted clients (``None``: it is not there), and their number."""
    members = sorted(set(clients))
    return _sorted(queues), members.index(client) if client in members else None, len(members)


def _point(key: str) -> int:
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _owner(points: Sequence[int], point: int) -> int:
    """Return the first point at or after ``point``, around the ring."""
    return points[bisect_left(points, point) % len(points)]


def _room(broker_name: str) -> str:
    return broker_name.partition("@")[0]


def _grouped(items: Collection[Item], place: Callable[[Item], tuple[str, str]]) -> dict[str, list[Item]]:
    """Return the items by room; ``place`` returns an item's room and its name for the error when it has none."""
    rooms: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        room, name = place(item)
        if not room:
            raise ConfigError(f"{name} is in no machine room; the function for rooms must know it")
        rooms[room].append(item)
    return rooms


AVERAGE: Final = "AVG"
STRATEGIES: Final[Mapping[str, Deal]] = {
    AVERAGE: _each(_block),
    "AVG_BY_CIRCLE": _each(_cards),
    "CONSISTENT_HASH": _ring,
}
"""The strategies that need no parameters, under the names that clients send."""
