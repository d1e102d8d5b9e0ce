"""Options of the data source ``metaq``, named as in Spark's Kafka source.

This module does no I/O. Every error is a ``ConfigError`` that names the option, so the driver shows one sentence before any
task runs. Spark hands option names over in lower case; errors show them as they are documented.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from metaq.client import checks
from metaq.errors import BadRequest, ConfigError
from metaq.protocol.inflating import MAX_INFLATED_BYTES
from metaq.spark.login import NOBODY, PASSWORD, TLS_CA, USER, Login, check_servers, login

SERVERS: Final = "metaq.bootstrap.servers"
PATH: Final = "path"
STRATEGY: Final = "startingOffsetsByTimestampStrategy"
MIN_OFFSETS: Final = "minOffsetsPerTrigger"
MAX_OFFSETS: Final = "maxOffsetsPerTrigger"
MAX_DELAY: Final = "maxTriggerDelay"
CHOICES: Final = ("subscribe", "subscribePattern", "assign")
READING: Final = (
    # the source
    SERVERS,
    USER,
    PASSWORD,
    TLS_CA,
    PATH,
    *CHOICES,
    # the range
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    STRATEGY,
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    # the rest
    MIN_OFFSETS,
    MAX_OFFSETS,
    MAX_DELAY,
    "minPartitions",
    "failOnDataLoss",
    "includeHeaders",
    "includeErrors",
    "maxInflatedBytes",
    "filterPushdown",
    "groupId",
    "verify",
)
EARLIEST: Final = -2
LATEST: Final = -1
"""Their numbers as offsets in JSON."""
_EDGES: Final = {"earliest": EARLIEST, "latest": LATEST}
_FLAGS: Final = {"true": True, "false": False}
_MOST: Final = (1 << 63) - 1
_DELAY_S: Final = 15 * 60.0
_TIME: Final = re.compile(r"([0-9]{1,15}) *([a-z]*)")
_UNITS: Final = {"": 1e-3, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
"""Seconds; a time without a unit is in milliseconds, as everywhere in Spark."""

Table = Mapping[str, Mapping[int, int]]
"""A number for each partition, by topic."""

NOWHERE: Final[Table] = MappingProxyType({})


class Place(NamedTuple):
    """The beginning or the end of a read."""

    option: str
    """The option that says so."""
    everywhere: int | None
    """The number for all partitions; ``None`` when ``table`` names each of them."""
    table: Table = NOWHERE
    by_time: bool = False
    """Whether the numbers are milliseconds since 1970, and not offsets, ``EARLIEST`` or ``LATEST``."""

    @property
    def stands(self) -> bool:
        """True when resolving the place later finds the same offsets, except for messages that have aged out since."""
        return not self.by_time and LATEST not in self.numbers

    @property
    def is_latest(self) -> bool:
        """True when it is the end of every partition."""
        return not self.by_time and self.numbers <= {None, LATEST}

    @property
    def numbers(self) -> set[int | None]:
        """All numbers of the place."""
        return {self.everywhere, *(number for row in self.table.values() for number in row.values())}


class Topics(NamedTuple):
    """The topics to read; exactly one of the fields is given."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    assigned: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class ReadOptions(NamedTuple):
    """The options of one read, batch or stream."""

    servers: str
    """Addresses of registries, or ``zk://…``; empty with ``path``."""
    path: str
    topics: Topics
    starting: Place | None
    ending: Place | None
    latest_if_late: bool
    """Whether a starting time after the newest message means the end, rather than an error."""
    min_offsets: int | None
    max_offsets: int | None
    max_delay_s: float
    """How long a micro-batch waits for ``min_offsets`` messages, from the last one on."""
    min_partitions: int | None
    fail_on_data_loss: bool
    headers: bool
    errors: bool
    """Whether a column gives the reason for each body that could not be inflated."""
    most_inflated: int
    """Largest size in bytes to which one body is inflated."""
    pushdown: bool
    group: str
    """The group whose offsets are committed; empty for none."""
    verify: bool
    """Whether records straight from disk are compared with their checksums."""
    login: Login = NOBODY

    def for_batch(self) -> "ReadOptions":
        """Return the options with a batch's defaults for its begin and end.

        ``ConfigError`` for a begin at latest, an end at earliest, or ``groupId``.
        """
        starting = self.starting or Place("startingOffsets", EARLIEST)
        if not starting.by_time and LATEST in starting.numbers:
            raise ConfigError(f"{starting.option}: a batch cannot begin at latest (-1); write earliest, or an offset")
        ending = self.ending or Place("endingOffsets", LATEST)
        if not ending.by_time and EARLIEST in ending.numbers:
            raise ConfigError(f"{ending.option}: a batch cannot end at earliest (-2); write latest, or an offset")
        if self.group:
            raise ConfigError("groupId: only streaming queries commit offsets of a group")
        return self._replace(starting=starting, ending=ending)

    def for_stream(self) -> "ReadOptions":
        """Return the options with the default for the begin of a new query.

        ``ConfigError`` for options that only a batch can have.
        """
        if self.ending is not None:
            advice = "use Trigger.AvailableNow to read what is there now"
            raise ConfigError(f"{self.ending.option}: a streaming query has no end; {advice}")
        if self.path:
            raise ConfigError(
                "path: a store folder can only be read as a batch; set metaq.bootstrap.servers to stream from brokers"
            )
        if self.pushdown:
            raise ConfigError("filterPushdown: Spark passes filters to batch reads only")
        return self._replace(starting=self.starting or Place("startingOffsets", LATEST))


class GivenOptions:
    """Options as Spark hands them over."""

    def __init__(self, options: Mapping[str, str], known: Sequence[str]) -> None:
        """Take the options. ``ConfigError`` for one that is not ``known``, with the name that may be meant."""
        self._options = {name.lower(): value for name, value in options.items()}
        shown = {name.lower(): name for name in known}
        for name in self._options.keys() - shown.keys():
            near = difflib.get_close_matches(name, shown, 1, 0.5)
            meant = f"did you mean {shown[near[0]]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"the option {name} is unknown; {meant}")

    def text(self, name: str) -> str:
        """Return an option's text; an empty one when it is absent."""
        return self._options.get(name.lower(), "").strip()

    def login(self, servers: str) -> Login:
        """Return the login for the servers. ``ConfigError``."""
        check_servers(SERVERS, servers)
        return login(self.text(USER), self._options.get(PASSWORD, ""), self.text(TLS_CA))

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name).lower()
        if text and text not in _FLAGS:
            raise ConfigError(f"{name}: {text!r} is neither true nor false")
        return _FLAGS.get(text, default)

    def number(self, name: str, least: int) -> int | None:
        """Return a whole number from ``least`` on; ``None`` when the option is absent. ``ConfigError`` for any other text."""
        text = self.text(name)
        if not text:
            return None
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
            raise ConfigError(f"{name}: {text!r} is not a whole number from {least} on")
        return int(text)

    def seconds(self, name: str) -> float | None:
        """Return a time as Spark writes it, such as ``15m``, in seconds; ``None`` when it is absent. ``ConfigError``."""
        text = self.text(name).lower()
        if not text:
            return None
        found = _TIME.fullmatch(text)
        if found is None or found[2] not in _UNITS:
            raise ConfigError(f"{name}: {text!r} is not a time like 500ms, 30s, 15m or 1h")
        return int(found[1]) * _UNITS[found[2]]

    def table(self, name: str, shape: str) -> dict[str, Any]:
        """Return a JSON object; ``shape`` is the example that errors show. ``ConfigError``."""
        try:
            found = json.loads(self.text(name))
        except ValueError as error:
            raise ConfigError(f"{name}: {self.text(name)!r} is not JSON ({error}); write it like {shape}") from error
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"{name}: {self.text(name)!r} is not a JSON object; write it like {shape}")
        return found


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read. ``ConfigError``."""
    given = GivenOptions(options, READING)
    servers, path = given.text(SERVERS), given.text(PATH)
    if bool(servers) == bool(path):
        wanted = "both are there" if servers else "neither is there"
        raise ConfigError(f"give {SERVERS} (host:port, or zk://host:port) or path (a store folder); {wanted}")
    if path and (given.text(USER) or given.text(TLS_CA)):
        raise ConfigError(f"path: a store folder is read without brokers; leave out {USER} and {TLS_CA}")
    least, most = given.number(MIN_OFFSETS, 1), given.number(MAX_OFFSETS, 1)
    if least is not None and most is not None and least > most:
        raise ConfigError(f"{MIN_OFFSETS}: {least} is over {MAX_OFFSETS}, {most}: no micro-batch could ever begin")
    delay = given.seconds(MAX_DELAY)
    if delay is not None and least is None:
        raise ConfigError(f"{MAX_DELAY}: it limits the wait for {MIN_OFFSETS} messages; give this option, too")
    return ReadOptions(
        servers=servers,
        path=path,
        topics=_topics(given),
        starting=_place(given, "starting"),
        ending=_place(given, "ending"),
        latest_if_late=_strategy(given),
        min_offsets=least,
        max_offsets=most,
        max_delay_s=_DELAY_S if delay is None else delay,
        min_partitions=given.number("minPartitions", 1),
        fail_on_data_loss=given.flag("failOnDataLoss", default=True),
        headers=given.flag("includeHeaders", default=False),
        errors=given.flag("includeErrors", default=False),
        most_inflated=given.number("maxInflatedBytes", 1) or MAX_INFLATED_BYTES,
        pushdown=given.flag("filterPushdown", default=False),
        group=_group(given),
        verify=given.flag("verify", default=True),
        login=given.login(servers),
    )


def _group(given: GivenOptions) -> str:
    name = given.text("groupId")
    if name:
        try:
            checks.group(name)
        except BadRequest as error:
            raise ConfigError(f"groupId: {error}") from error
    return name


def _topics(given: GivenOptions) -> Topics:
    chosen = [name for name in CHOICES if given.text(name)]
    if len(chosen) != 1:
        raise ConfigError(f"give exactly one of {', '.join(CHOICES)}; {' and '.join(chosen) or 'none'} is given")
    name = chosen[0]
    if name == "subscribe":
        return Topics(names=tuple(sorted({topic.strip() for topic in given.text(name).split(",")} - {""})))
    if name == "subscribePattern":
        try:
            re.compile(given.text(name))
        except re.error as error:
            raise ConfigError(f"{name}: {given.text(name)!r} is not a regular expression: {error}") from error
        return Topics(pattern=given.text(name))
    shape = '{"orders": [0, 1]}'
    assigned = {}
    for topic, numbers in given.table(name, shape).items():
        if not isinstance(numbers, list) or not numbers or not all(_is_whole(n) and n >= 0 for n in numbers):
            raise ConfigError(f"{name}: topic {topic} has {numbers!r}; write its partitions like {shape}")
        assigned[topic] = tuple(sorted(set(numbers)))
    return Topics(assigned=assigned)


def _place(given: GivenOptions, which: str) -> Place | None:
    """Return the begin or the end. Of the three options the most specific one counts, as for Kafka: a time, times, offsets."""
    time_ms = given.number(f"{which}Timestamp", 0)
    if time_ms is not None:
        return Place(f"{which}Timestamp", time_ms, by_time=True)
    name = f"{which}OffsetsByTimestamp"
    if given.text(name):
        return Place(name, None, _numbers_of(given, name, '{"orders": {"0": 1700000000000}}', 0), by_time=True)
    name = f"{which}Offsets"
    text = given.text(name)
    if not text:
        return None
    if text.lower() in _EDGES:
        return Place(name, _EDGES[text.lower()])
    if not text.startswith("{"):
        raise ConfigError(f'{name}: {text!r} is neither earliest nor latest nor JSON like {{"orders": {{"0": 23, "1": -2}}}}')
    return Place(name, None, _numbers_of(given, name, '{"orders": {"0": 23, "1": -2}}', EARLIEST))


def _numbers_of(given: GivenOptions, name: str, shape: str, least: int) -> Table:
    found: dict[str, dict[int, int]] = {}
    for topic, row in given.table(name, shape).items():
        if not isinstance(row, dict) or not row:
            raise ConfigError(f"{name}: topic {topic} has {row!r}; write it like {shape}")
        for partition, number in row.items():
            if not re.fullmatch(r"[0-9]{1,9}", partition):
                raise ConfigError(f"{name}: topic {topic} has a partition {partition!r}; partitions are numbers from 0 on")
            if not _is_whole(number) or not least <= number <= _MOST:
                raise ConfigError(
                    f"{name}: {number!r} of topic {topic}, partition {partition}, is not a number from {least} on"
                )
            found.setdefault(topic, {})[int(partition)] = number
    return found


def _strategy(given: GivenOptions) -> bool:
    text = given.text(STRATEGY).lower()
    if text not in {"", "error", "latest"}:
        raise ConfigError(f"{STRATEGY}: {text!r} is neither error nor latest")
    return text == "latest"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
