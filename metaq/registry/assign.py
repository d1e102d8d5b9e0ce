"""Who consumes which queues of a topic (specs: remoting protocol, section 5.6).

Each member of a group computes its own share from the same two lists, so nobody has to be asked, and all must compute the same:
the order of the lists does not matter, doubles count once. A client that is not among the clients of the group gets nothing.
"""

import hashlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

from metaq.errors import ConfigError
from metaq.message import MessageQueue

Assign = Callable[[str, Collection[MessageQueue], Collection[str]], list[MessageQueue]]
"""Of a client's id, all queues and the ids of all clients of the group: the client's own queues, sorted."""

Item = TypeVar("Item")

VIRTUAL_NODES: Final = 10
"""Points of each client on the ring of consistent hashing."""


def average(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """AVG: neighbouring queues in blocks of equal size; the first clients have one more when they do not come out even."""
    ordered, index, count = _places(client, queues, clients)
    if index is None:
        return []
    size, rest = divmod(len(ordered), count)
    start = index * size + min(index, rest)
    return ordered[start : start + size + (index < rest)]


def average_by_circle(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """AVG_BY_CIRCLE: queues are dealt out like cards."""
    ordered, index, count = _places(client, queues, clients)
    return [] if index is None else ordered[index::count]


def consistent_hash(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """CONSISTENT_HASH: a client that comes or goes moves few queues, but shares are uneven."""
    ring: dict[int, str] = {}
    for member in sorted(set(clients)):
        # Of two clients on one point the later one has it, as in the Java client's map.
        ring |= {_point(f"{member}-{number}"): member for number in range(VIRTUAL_NODES)}
    points = sorted(ring)
    return [queue for queue in _sorted(queues) if points and ring[_owner(points, _point(str(queue)))] == client]


def broadcast(client: str, queues: Collection[MessageQueue], clients: Collection[str]) -> list[MessageQueue]:
    """Every client of the group has every queue."""
    return _sorted(queues) if client in clients else []


def configured(own: Collection[MessageQueue]) -> Assign:
    """CONFIG: always the queues ``own``, whatever there is and whoever else consumes."""
    fixed = _sorted(own)
    return lambda _client, _queues, _clients: list(fixed)


def machine_room(rooms: Collection[str]) -> Assign:
    """MACHINE_ROOM: shares out only the queues of brokers that are named ``room@name`` with one of ``rooms``."""

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
    """MACHINE_ROOM_NEARBY: ``inner`` shares the queues of a room among its clients, those of a room without any among all.

    Args:
        inner: what is used within a room.
        room_of_broker: room of a broker's name.
        room_of_client: room of a client's id.
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


def _sorted(queues: Collection[MessageQueue]) -> list[MessageQueue]:
    return sorted(set(queues))


def _places(
    client: str, queues: Collection[MessageQueue], clients: Collection[str]
) -> tuple[list[MessageQueue], int | None, int]:
    """The queues in order, the place of the client among the sorted clients (``None``: it is not there), how many clients."""
    members = sorted(set(clients))
    return _sorted(queues), members.index(client) if client in members else None, len(members)


def _point(key: str) -> int:
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


def _owner(points: Sequence[int], point: int) -> int:
    """The first point at or after ``point``, around the ring."""
    return points[bisect_left(points, point) % len(points)]


def _room(broker_name: str) -> str:
    return broker_name.partition("@")[0]


def _grouped(items: Collection[Item], place: Callable[[Item], tuple[str, str]]) -> dict[str, list[Item]]:
    """Items by room; ``place`` tells the room and what to call the item when it has none."""
    rooms: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        room, name = place(item)
        if not room:
            raise ConfigError(f"{name} is in no machine room; the function that tells rooms must know it")
        rooms[room].append(item)
    return rooms
