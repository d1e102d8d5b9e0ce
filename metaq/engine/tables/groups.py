"""The table of subscription groups: the consumer groups that exist, and the settings of each.

It is kept in ``config/subscriptionGroup.json`` in RocketMQ's form. The members that are connected now are in
``metaq.engine.tables.clients``.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from metaq.engine.tables.topics import FOLDER
from metaq.errors import BadRequest, Overloaded, RequestFailed
from metaq.message import DEAD_PREFIX, MAX_PARTITIONS, RETRY_PREFIX
from metaq.protocol.record import MAX_TOPIC_LENGTH
from metaq.protocol.remoting import attributes as names
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES, changed, check_attributes, number, word_attribute
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.fastjson import shown
from metaq.store.files.disk import Disk
from metaq.store.files.documents import read_document, write_document
from metaq.store.files.filecache import Run

logger = logging.getLogger(__name__)

GROUPS: Final = "subscriptionGroup.json"
MAX_NAME_LENGTH: Final = MAX_TOPIC_LENGTH - len(RETRY_PREFIX)
"""The longest group name: each group has a retry topic that is named after it."""
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")

SAFE_ACKS: Final = "safe"
"""A value of ``lease_acks``: acks are answered when they are as safe as messages, leases granted when replicas have them."""

SYSTEM_PREFIX: Final = "CID_RMQ_SYS_"
SYSTEM_GROUPS: Final = (
    "TOOLS_CONSUMER",
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
    "CID_RMQ_SYS_TRANS",
)
"""Groups that every broker has (specs: remoting protocol, section 3.1)."""


@dataclass(frozen=True, slots=True)
class Group:
    """The settings of one consumer group."""

    name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    """Stored and shown; no broker acts on it."""
    consume_broadcast_enable: bool = True
    retry_queue_nums: int = 1
    """Partitions of the retry topic; 0: failed messages are not delivered again."""
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    attributes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Further settings by name (``metaq.protocol.remoting.attributes``); the fields below have their values."""

    # each pop looks at these
    priority_factor: int = field(init=False, repr=False, compare=False)
    """The number of pops, of 100 from a topic with priorities, that begin with the highest one."""
    max_in_flight: int = field(init=False, repr=False, compare=False)
    """Messages of one partition that may be leased at once."""
    max_open: int = field(init=False, repr=False, compare=False)
    """Messages of one partition that may be given and not finished, leased or waiting."""
    max_invisible_ms: int = field(init=False, repr=False, compare=False)
    """The longest lease."""
    order: str = field(init=False, repr=False, compare=False)
    """The messages that are given one after the other: ``none``, those of a ``partition`` or of a ``key``."""
    lease_acks: str = field(init=False, repr=False, compare=False)
    """When an ack is answered, and a lease granted: when it is ``appended``, or ``safe``."""
    lease_aged_out: str = field(init=False, repr=False, compare=False)
    """The end of an open message whose segment is deleted: ``dead`` letter or ``drop``."""

    def __post_init__(self) -> None:
        for name in (names.PRIORITY_FACTOR, names.MAX_IN_FLIGHT, names.MAX_OPEN, names.MAX_INVISIBLE_MS):
            object.__setattr__(self, _FIELDS.get(name, name), number(GROUP_ATTRIBUTES, self.attributes, name))
        for name in (names.ORDER, names.LEASE_ACKS, names.LEASE_AGED_OUT):
            object.__setattr__(self, name, word_attribute(GROUP_ATTRIBUTES, self.attributes, name))

    @property
    def retry_topic(self) -> str:
        return RETRY_PREFIX + self.name

    @property
    def dead_topic(self) -> str:
        return DEAD_PREFIX + self.name

    def row(self) -> dict[str, Any]:
        """Return the group in the form of request bodies and the file."""
        own = {"attributes": dict(self.attributes)} if self.attributes else {}
        return {wire: getattr(self, name) for name, wire in _WIRE.items()} | own


_WIRE: Final = {
    "broker_id": "brokerId",
    "consume_broadcast_enable": "consumeBroadcastEnable",
    "consume_enable": "consumeEnable",
    "consume_from_min_enable": "consumeFromMinEnable",
    "name": "groupName",
    "notify_consumer_ids_changed_enable": "notifyConsumerIdsChangedEnable",
    "retry_max_times": "retryMaxTimes",
    "retry_queue_nums": "retryQueueNums",
    "which_broker_when_consume_slowly": "whichBrokerWhenConsumeSlowly",
}
_FIELDS: Final = {names.PRIORITY_FACTOR: "priority_factor"}
"""The fields whose names are not those of their attributes."""
_FLAGS: Final = frozenset(name for name in _WIRE if name.endswith("_enable"))


def group_of(row: Mapping[str, Any]) -> Group:
    """Return the group that a row of a request body or the file describes; absent members have their defaults.

    Raises ``BadRequest`` for values of a wrong type, or without a name.
    """
    values: dict[str, Any] = {}
    for name, wire in _WIRE.items():
        value = row.get(wire)
        if value is None:
            continue
        kind = str if name == "name" else bool if name in _FLAGS else int
        if type(value) is not kind:
            raise BadRequest(f"subscription group: {wire} is {shown(value)}, not of type {kind.__name__}")
        values[name] = value
    if "name" not in values:
        raise BadRequest("subscription group: groupName is missing")
    return Group(**values, attributes=_attributes_of(row))


def _attributes_of(row: Mapping[str, Any]) -> dict[str, str]:
    pairs = row.get("attributes")
    if pairs is None:
        return {}
    if not isinstance(pairs, dict) or not all(type(value) is str for value in pairs.values()):
        raise BadRequest(f"subscription group: attributes is {shown(pairs)}, not texts by name")
    check_attributes(GROUP_ATTRIBUTES, {name: value for name, value in pairs.items() if name in GROUP_ATTRIBUTES})
    return pairs


def with_changes(group: Group, known: Group | None) -> Group:
    """Return a group as a request describes it: its attributes are changes of those of the ``known`` one."""
    return replace(group, attributes=changed(GROUP_ATTRIBUTES, {} if known is None else known.attributes, group.attributes))


def check_group_name(name: str) -> None:
    """Raise ``BadRequest`` unless a name follows RocketMQ's rule and leaves room for the prefix of the retry topic."""
    if len(name) > MAX_NAME_LENGTH:
        raise BadRequest(f"a group name of {len(name)} characters is longer than {MAX_NAME_LENGTH}")
    if not _NAME.fullmatch(name):
        raise BadRequest(f"the group name {name[:40]!r} is empty or has characters other than letters, digits, %, |, _ and -")


class GroupTable:
    """All subscription groups of this broker. Changes take effect at once, and are durable after the next ``save``."""

    def __init__(self, directory: Path, *, max_groups: int, auto_create: bool) -> None:
        self._path = directory / FOLDER / GROUPS
        self.max_groups = max_groups
        self.auto_create = auto_create
        self._groups = {name: Group(name) for name in SYSTEM_GROUPS}
        self._version = 0
        self._saved_version = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups[name] for name in sorted(self._groups))

    def get(self, name: str) -> Group | None:
        return self._groups.get(name)

    @property
    def version(self) -> int:
        """The version of the table, which rises with every change."""
        return self._version

    def is_system(self, name: str) -> bool:
        """Return whether a group belongs to the broker or its tools, not to users."""
        return name in SYSTEM_GROUPS or name.startswith(SYSTEM_PREFIX)

    def ensure(self, name: str) -> Group:
        """Return the group, created on first use; raise ``RequestFailed`` with code 26 when that is not allowed."""
        group = self._groups.get(name)
        return self.put(self.imagine(name)) if group is None else group

    def imagine(self, name: str) -> Group:
        """Return the group, or the one that ``ensure`` would create; raise what it raises when that is not allowed."""
        group = self._groups.get(name)
        if group is not None:
            return group
        if not self.auto_create and not self.is_system(name):
            reason = f"the group {name[:MAX_TOPIC_LENGTH]} does not exist, and use does not create it (auto_create_groups)"
            raise RequestFailed(Response.SUBSCRIPTION_GROUP_NOT_EXIST, reason)
        return Group(name)

    def put(self, group: Group) -> Group:
        """Create or replace a group and return it.

        Raises ``BadRequest`` for a bad name or attribute or too many retry partitions, ``Overloaded`` beyond ``max_groups``.
        """
        known = self._groups.get(group.name)
        if known == group:
            return known
        if group.retry_queue_nums > MAX_PARTITIONS:
            raise BadRequest(f"retryQueueNums is {group.retry_queue_nums}: a topic has at most {MAX_PARTITIONS} partitions")
        check_attributes(GROUP_ATTRIBUTES, group.attributes)
        if known is None:
            check_group_name(group.name)
            if len(self._groups) - len(SYSTEM_GROUPS) >= self.max_groups:
                raise Overloaded(f"there are already {self.max_groups} groups (max_groups)", retry_after_ms=60_000)
        self._groups[group.name] = group
        self._version += 1
        return group

    def remove(self, name: str) -> None:
        """Remove a group if it exists; ``OffsetTable.remove`` removes its offsets."""
        if self._groups.pop(name, None) is not None:
            self._version += 1

    # -- the file -----------------------------------------------------------------------------------------------------

    def load(self, disk: Disk) -> list[str]:
        """Read the file; return the problems that were found in it."""
        content, problems = read_document(disk, self._path)
        if content is not None:
            for row in content["subscriptionGroupTable"].values():
                group = group_of(row)
                self._groups[group.name] = group
            self._version = self._saved_version = content["dataVersion"]["counter"]
        if problems:
            self._version += 1
        return problems

    def reload(self, disk: Disk) -> None:
        """Replace the table by the file that replication has written; groups that it does not have are gone."""
        self._groups = {name: Group(name) for name in SYSTEM_GROUPS}
        for problem in self.load(disk):
            logger.error("table of groups damaged problem=%s", problem)

    @property
    def unsaved(self) -> bool:
        return self._version != self._saved_version

    def save(self, disk: Disk, now_ms: int, run: Run) -> None:
        """Write the table as it is now to the file, durably."""
        version, content = self._version, self.content(now_ms)
        run(lambda: disk.make_directories(self._path.parent))
        run(lambda: write_document(disk, self._path, content))
        self._saved_version = version

    def content(self, now_ms: int) -> dict[str, Any]:
        """Return the table in the form of the file and of the answer to 201 (get all subscription groups)."""
        version = {"timestamp": now_ms, "counter": self._version}
        return {"dataVersion": version, "subscriptionGroupTable": {group.name: group.row() for group in self}}
