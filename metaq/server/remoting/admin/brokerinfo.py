"""The broker's settings, state and statistics: 25, 26, 28, 315 (specs: remoting protocol, 3.3)."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import metaq
from metaq.address import Address
from metaq.config import MOST_HOURS
from metaq.engine.context import Context
from metaq.engine.figures.statistics import Day
from metaq.engine.leases.clocks import ConsumerClocks
from metaq.engine.schedule import LEVEL_SECONDS
from metaq.engine.turn import Turns
from metaq.errors import BadRequest, MetaqError, RequestFailed
from metaq.fields import plain
from metaq.message import DEFAULT_TOPIC, SCHEDULE_TOPIC, TopicPartition
from metaq.protocol.record import decode_record
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import decode_settings, encode_rates, encode_settings
from metaq.protocol.remoting.codes import MASTER, READ, VERSION, WRITE, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import ViewStats, decode_header
from metaq.protocol.remoting.routes import DataVersion, encode_data_version, encode_kv_table
from metaq.server.access.permissions import Action, demand
from metaq.server.reload import Owner
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler
from metaq.store.figures import StoreFigures
from metaq.store.files.filecache import Read
from metaq.store.log.retention import HOUR_MS

logger = logging.getLogger(__name__)

VERSION_NAME: Final = "V4_9_8"
"""RocketMQ's name for ``VERSION``."""
UNBOUNDED: Final = str((1 << 31) - 1)
DAY_S: Final = 86_400
GIB: Final = 1024**3


class BrokerInfoHandler:
    """Shows the broker's settings and state, and changes the few settings that can be changed while it runs."""

    def __init__(
        self,
        context: Context,
        turns: Turns,
        positions: Callable[[], Mapping[int, int]],
        transactions: Callable[[Read], Mapping[str, object]],
        clocks: ConsumerClocks,
        later: Later,
        advertised: Address,
        owner: Owner,
    ) -> None:
        """Prepare. ``positions`` returns, for each delay level, the ordinal up to which its messages are delivered.

        ``transactions`` returns figures by name; ``owner`` has the settings in force, and the history.
        """
        self._context = context
        self._store = context.store
        self._turns = turns
        self._positions = positions
        self._transactions = transactions
        self._clocks = clocks
        self._later = later
        self._advertised = advertised
        self._owner = owner
        self._started_ms = context.store.clock.now_ms()
        self._version = 0  # number of changes to the settings since then

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.UPDATE_BROKER_CONFIG: self.update_settings,
            Request.GET_BROKER_CONFIG: self.settings,
            Request.GET_BROKER_RUNTIME_INFO: self.runtime,
            Request.VIEW_BROKER_STATS_DATA: self.rates,
        }

    # -- settings -----------------------------------------------------------------------------------------------------

    def settings(self, session: RemotingSession, _: RemotingCommand) -> Answer:
        """Return the settings (26): under RocketMQ's names, then under metaq's own."""
        demand(session.principal, Action.INSPECT)
        own = plain(self._context.settings, without=("topics",))
        version = encode_data_version(DataVersion(self._started_ms, self._version)).decode()
        return Answer(fields={"version": version}, body=(encode_settings({**self._rocketmq_settings(), **own}),))

    def _rocketmq_settings(self) -> dict[str, object]:
        settings, topics, rules = self._context.settings, self._context.topics, self._store.settings.retention
        host, port = self._advertised
        template, is_master = topics.get(DEFAULT_TOPIC), self._context.replicas.is_master
        return {
            "brokerName": settings.broker_name,
            "brokerClusterName": settings.cluster_name,
            "brokerId": MASTER if is_master else settings.replica_number,
            "brokerRole": self._role(),
            "brokerIP1": host,
            "listenPort": port,
            "namesrvAddr": settings.registries or settings.registry_listen,
            "brokerPermission": topics.permission,
            "autoCreateTopicEnable": settings.auto_create_topics,
            "autoCreateSubscriptionGroup": settings.auto_create_groups,
            "defaultTopicQueueNums": 0 if template is None else template.partitions,
            "enablePropertyFilter": settings.sql_filter,
            "longPollingEnable": True,
            "slaveReadEnable": True,
            "filterServerNums": 0,
            "traceOn": True,
            "traceTopicEnable": False,
            "msgTraceTopicName": "RMQ_SYS_TRACE_TOPIC",
            "useTLS": bool(settings.tls_certificate),
            "messageDelayLevel": " ".join(map(_duration, LEVEL_SECONDS)),
            "maxMessageSize": settings.max_message_bytes,
            "flushDiskType": "SYNC_FLUSH" if settings.durability.on_disk else "ASYNC_FLUSH",
            "storePathRootDir": settings.data,
            "mapedFileSizeCommitLog": settings.segment_bytes,
            "fileReservedTime": f"{rules.keep_ms / HOUR_MS:g}",
            "deleteWhen": f"{rules.hour:02d}",
            "diskMaxUsedSpaceRatio": round(rules.clean_ratio * 100),
        }

    def _role(self) -> str:
        """Return RocketMQ's name of this replica's role."""
        if not self._context.replicas.is_master:
            return "SLAVE"
        return "SYNC_MASTER" if self._context.settings.durability.on_replicas else "ASYNC_MASTER"

    def update_settings(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Change settings (25): all of them or none.

        The changes last until a reload changes them, or the process ends. Raise ``BadRequest`` for a setting that cannot be
        changed, or a bad value.
        """
        demand(session.principal, Action.ADMINISTER)
        changes: dict[str, Any] = {}
        for name, value in decode_settings(request.body).items():
            if name not in _CHANGEABLE:
                known = ", ".join(_CHANGEABLE)
                raise BadRequest(f"{name[:60]} cannot be changed while the broker runs; these can: {known}")
            setting, read = _CHANGEABLE[name]
            changes[setting] = read(name, value)
        if not changes:
            raise BadRequest("the body names no setting; write lines of NAME=VALUE")
        before = self._owner.settings
        self._owner.configure(before.merged(changes))
        self._version += 1
        for setting, now in changes.items():
            logger.info("setting changed name=%s from=%s to=%s", setting, getattr(before, setting), now)
        return DONE

    # -- what it is doing ---------------------------------------------------------------------------------------------

    def runtime(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return the broker's state and statistics (28), with every name that RocketMQ has; 0 where this broker has no such
        thing."""
        demand(session.principal, Action.INSPECT)
        self._later.read(session, request, self._runtime)

    def _runtime(self, read: Read) -> Answer:
        table = {**self._identity(), **self._log(read), **self._counted(), **self._waiting(), **self._schedule(), **_NOTHING}
        table.update(self._transactions(read))
        table.update(self._context.replicas.numbers())
        return Answer(body=(encode_kv_table({name: str(value) for name, value in table.items()}),))

    def _identity(self) -> dict[str, object]:
        up_s = int(time.monotonic() - self._context.counters.started_s)
        days, hours, minutes = up_s // DAY_S, up_s // 3600 % 24, up_s // 60 % 60
        return {
            "brokerVersion": VERSION,
            "brokerVersionDesc": VERSION_NAME,
            "metaqVersion": metaq.__version__,
            "metaqNow": self._store.clock.now_ms(),
            "metaqLag": round(self._owner.lasting.history.now.lag),
            "metaqWritable": self._refusal() or "yes",
            "metaqClocksAhead": fastjson.encode([each._asdict() for each in self._clocks.ahead()]).decode(),
            "brokerActive": "true",
            "bootTimestamp": self._started_ms,
            "startAcceptSendRequestTimeStamp": 0,
            "runtime": f"[ {days} days, {hours} hours, {minutes} minutes, {up_s % 60} seconds ]",
        }

    def _refusal(self) -> str | None:
        """Return the reason why nothing can be stored now, or ``None``."""
        try:
            self._store.check_writable()
        except MetaqError as error:
            return str(error)
        return None

    def _log(self, read: Read) -> dict[str, object]:
        import shutil  # noqa: PLC0415 - a broker at rest does without it

        store, root = self._store, self._context.settings.data
        figures = StoreFigures.of(store)
        room = shutil.disk_usage(root)
        ratio = store.disk.usage(root).ratio
        oldest = store.record_at_offset(figures.begin, read)
        oldest_ms = store.clock.now_ms() if oldest is None else decode_record(oldest.buffer[oldest.at :]).store_ms
        return {
            "commitLogMinOffset": figures.begin,
            "commitLogMaxOffset": figures.end,
            "commitLogDirCapacity": f"Total : {room.total / GIB:.1f} GiB, Free : {room.free / GIB:.1f} GiB.",
            "commitLogDiskRatio": ratio,
            f"commitLogDiskRatio_{root}": ratio,
            "consumeQueueDiskRatio": ratio,
            "dispatchBehindBytes": store.indexing.behind,
            "earliestMessageTimeStamp": oldest_ms,
            "remainHowManyDataToFlush": f"{figures.end - store.durable_end} B",
        }

    def _counted(self) -> dict[str, object]:
        statistics, counters = self._context.statistics, self._context.counters
        put, got = statistics.put_in_all(), statistics.got_in_all()
        asked, missed = statistics.asked_per_second(), statistics.missed_per_second()
        transferred = _averages(statistics.transferred_per_second())
        return {
            "putTps": _averages(statistics.put_per_second()),
            "getTotalTps": _averages(asked),
            "getMissTps": _averages(missed),
            "getFoundTps": _averages(tuple(all_ - miss for all_, miss in zip(asked, missed, strict=True))),
            "getTransferedTps": transferred,
            "getTransferredTps": transferred,
            "putMessageTimesTotal": put.messages,
            "putMessageSizeTotal": put.size,
            "putMessageAverageSize": put.size / put.messages if put.messages else 0.0,
            "putMessageFailedTimes": counters.put_failed.count,
            **_mornings("msgPutTotal", statistics.put_by_day, put.messages),
            **_mornings("msgGetTotal", statistics.got_by_day, got.messages),
        }

    def _waiting(self) -> dict[str, object]:
        """Return the queues of waiting work: puts wait for the disk, as do reads of what is not in memory.

        There are no others.
        """
        settings = self._context.settings
        return {
            "sendThreadPoolQueueSize": self._turns.waiting,
            "sendThreadPoolQueueCapacity": UNBOUNDED,
            "sendThreadPoolQueueHeadWaitTimeMills": self._turns.longest_wait_ms,
            "pullThreadPoolQueueSize": self._later.waiting_reads,
            "pullThreadPoolQueueCapacity": settings.max_cold_reads,
        }

    def _schedule(self) -> dict[str, object]:
        table: dict[str, object] = {}
        for level, position in self._positions().items():
            queue = self._store.queues.get(TopicPartition(SCHEDULE_TOPIC, level - 1))
            table[f"scheduleMessageOffset_{level}"] = f"{position},{0 if queue is None else queue.readable}"
        return table

    def rates(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the rates of one statistic (315)."""
        header = decode_header(ViewStats, request.fields)
        demand(session.principal, Action.INSPECT)
        rates = self._context.statistics.rates(header.stats_name, header.stats_key)
        if rates is None:
            reason = f"nothing is counted as {header.stats_name[:40]} of {header.stats_key[:255]}"
            raise RequestFailed(Response.SYSTEM_ERROR, reason)
        return Answer(body=(encode_rates(rates),))


_NOTHING: Final[dict[str, object]] = {
    "EndTransactionQueueSize": 0,
    "EndTransactionThreadPoolQueueCapacity": 0,
    "dispatchMaxBuffer": 0,
    "getMessageEntireTimeMax": 0,
    "pageCacheLockTimeMills": 0,
    "pullThreadPoolQueueHeadWaitTimeMills": 0,
    "putLatency99": 0.0,
    "putLatency999": 0.0,
    "putMessageDistributeTime": "",
    "putMessageEntireTimeMax": 0,
    "queryThreadPoolQueueCapacity": 0,
    "queryThreadPoolQueueHeadWaitTimeMills": 0,
    "queryThreadPoolQueueSize": 0,
    "remainTransientStoreBufferNumbs": UNBOUNDED,
    "timerCongestNum": 0,
    "timerDequeueTps": 0.0,
    "timerEnqueueTps": 0.0,
    "timerOffsetBehind": 0,
    "timerReadBehind": 0,
}
"""Values that RocketMQ reports and that have no counterpart in this broker."""


def _averages(rates: tuple[float, ...]) -> str:
    """Return averages over 10 s, 1 min and 10 min as text: tools read the first, and fail if there is none."""
    return " ".join(f"{rate:.2f}" for rate in rates)


def _mornings(name: str, day: Day, now: int) -> dict[str, object]:
    return {
        f"{name}YesterdayMorning": day.yesterday.messages,
        f"{name}TodayMorning": day.today.messages,
        f"{name}TodayNow": now,
    }


def _duration(seconds: int) -> str:
    for size, unit in ((3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _whole_number(name: str, value: str, most: int) -> int:
    if not (value.isascii() and value.isdecimal() and int(value) <= most):
        raise BadRequest(f"{name} is {value[:40]!r}, not a whole number up to {most}")
    return int(value)


def _permission(name: str, value: str) -> int:
    return _whole_number(name, value, READ | WRITE) & (READ | WRITE)


def _keep_hours(name: str, value: str) -> int:
    hours = _whole_number(name, value, MOST_HOURS)
    if hours == 0:
        raise BadRequest(f"{name} is 0: messages would be deleted as soon as their segment is full")
    return hours


_CHANGEABLE: Final[Mapping[str, tuple[str, Callable[[str, str], int]]]] = {
    "brokerPermission": ("broker_permission", _permission),
    "fileReservedTime": ("keep_hours", _keep_hours),
    "deleteWhen": ("delete_hour", lambda name, value: _whole_number(name, value, 23)),
}
"""By RocketMQ's name: the setting, and the function that reads its value and raises ``BadRequest`` for a bad one."""
