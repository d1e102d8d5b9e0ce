"""The metrics and readiness of a broker, read from its parts at the time of each request.

Label values are names of topics, groups and replicas, and a few fixed words. Their number is limited by ``max_topics``,
``max_groups`` and ``metaq.engine.figures.statistics.MOST_KEYS``.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from metaq.engine.context import Context
from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.figures.history import History
from metaq.engine.figures.metrics import Family, Metric, Sample
from metaq.engine.figures.statistics import NOTHING
from metaq.engine.leases.figures import LeaseFigures
from metaq.engine.offsets.lags import Lags, with_rests
from metaq.engine.offsets.offsetexport import OffsetExporter
from metaq.engine.reading.hold import Holds
from metaq.engine.registry import Registry
from metaq.engine.timers.timers import Timers
from metaq.engine.turn import Turns
from metaq.errors import MetaqError
from metaq.leases.figures import LeaseSums
from metaq.message import INTERNAL_TOPICS, SCHEDULE_TOPIC, GroupPartition, TopicPartition
from metaq.protocol.record import store_ms
from metaq.protocol.remoting.codes import Response
from metaq.server.endpoint import Endpoint
from metaq.server.http import metrics
from metaq.server.remoting.session import RemotingSession
from metaq.server.text.session import TextSession
from metaq.server.wire.reads import StoreReads
from metaq.store.figures import StoreFigures
from metaq.store.files.filecache import Read, Rest, Run
from metaq.store.queues.consumequeue import ConsumeQueue

logger = logging.getLogger(__name__)

LACKS: Final = {
    Response.FLUSH_DISK_TIMEOUT: "disk",
    Response.FLUSH_SLAVE_TIMEOUT: "replicas",
    Response.SLAVE_NOT_AVAILABLE: "enough_replicas",
}
"""What was lacking when an answer was late."""
_HUMP: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
LEAVES: Final = "this broker stops, or changes its role"


@dataclass(slots=True)
class BrokerMetrics:
    """The source of one broker's metrics and readiness."""

    context: Context
    endpoint: Endpoint
    turns: Turns
    holds: Holds
    reads: StoreReads
    positions: Callable[[], Mapping[int, int]]
    """Returns, for each delay level, the ordinal up to which its messages are delivered."""
    transactions: Callable[[Read], Mapping[str, object]]
    """Returns the figures of transactions by name."""
    timers: Timers
    dedupe: Dedupe
    leases: LeaseFigures
    export: OffsetExporter
    registered: Callable[[], str | None]
    """Returns the reason why clients cannot find this broker, or ``None``."""
    registry: Registry | None
    run: Run
    history: History
    leaves: bool = False
    """True when the broker is about to close its store."""
    lags: Lags = field(init=False)
    _opened_at: int = field(init=False)
    """The end of the log when the store was opened."""
    _oldest: tuple[int, int | None] = (-1, None)
    """The begin of the log when its first message was last read, and when that message was stored; ``None`` when it is
    damaged."""
    _left_out: dict[str, str] = field(default_factory=dict)
    """The parts left out because their source fails, with the reason."""

    def __post_init__(self) -> None:
        self._opened_at = self.context.store.log.end
        self.lags = Lags(self.context, self.leases.of)

    # -- readiness ----------------------------------------------------------------------------------------------------

    def reasons(self) -> list[str]:
        if self.leaves:
            return [LEAVES]
        found = [self._refusal(), self.context.replicas.health().problem, self.registered()]
        return [reason for reason in found if reason is not None]

    def facts(self) -> Mapping[str, object]:
        return {"role": "master" if self.context.replicas.is_master else "slave"}

    def stalled(self, seconds: float) -> None:
        self.history.stalled(seconds)

    def _refusal(self) -> str | None:
        """Return why this replica cannot write, or ``None``: messages if it is the master, copies of them if it is a slave."""
        store = self.context.store
        try:
            store.check_healthy()
            if self.context.replicas.is_master:
                store.check_master()
                store.check_writable()
        except MetaqError as error:
            return str(error)
        return None

    # -- metrics ------------------------------------------------------------------------------------------------------

    def families(self, rest: Rest) -> Iterator[Family]:
        """Yield all metrics, without the parts whose source fails. ``rest`` is called between the steps of collecting them."""
        parts = (
            self._messages,
            self._answers,
            self._lags,
            self._ages_of_lags,
            self._readers,
            self._leased,
            self._leases,
            self._reads,
            self._log,
            self._age_of_log,
            self._disk,
            self._store,
            self._sizes,
            self._delays,
            self._ids,
            self._transactions,
            self._replicas,
            self._registries,
        )
        for part in parts:
            if self.leaves:  # the store is about to be closed
                return
            name = part.__name__.removeprefix("_")
            try:
                for metric, samples in part(rest):
                    yield metric, list(with_rests(samples, rest))
            except MetaqError as error:
                if self._left_out.get(name) != str(error):  # log each reason once
                    logger.warning("metrics left out part=%s reason=%s", name, error)
                self._left_out[name] = str(error)
            else:
                self._left_out.pop(name, None)

    def _messages(self, rest: Rest) -> Iterator[Family]:
        statistics = self.context.statistics
        topics = [topic for topic in with_rests(statistics.topics(), rest) if topic not in INTERNAL_TOPICS]
        yield metrics.MESSAGES_IN, (((topic,), statistics.put_to(topic).messages) for topic in topics)
        yield metrics.BYTES_IN, (((topic,), statistics.put_to(topic).size) for topic in topics)
        given = [(key, totals) for key, totals in with_rests(statistics.got_by_group(), rest) if totals != NOTHING]
        yield metrics.MESSAGES_OUT, ((key, totals.messages) for key, totals in given)
        yield metrics.BYTES_OUT, ((key, totals.size) for key, totals in given)

    def _answers(self, rest: Rest) -> Iterator[Family]:
        counters, turns = self.context.counters, self.turns
        yield _one(metrics.ASKED, counters.get.count)
        yield _one(metrics.MISSED, counters.get_miss.count)
        yield metrics.REFUSED, [((_reason(error),), count) for error, count in counters.refused.items()]
        yield metrics.LATE, [((lacks,), turns.late[code]) for code, lacks in LACKS.items()]
        yield metrics.SEND, [((), turns.send_times)]
        yield metrics.SYNC, [((), turns.sync_times)]
        pace = self.endpoint.pace
        yield metrics.TURN, [((), pace.times)]
        yield _one(metrics.LONGEST_TURN, pace.longest_s)
        yield _one(metrics.WAITING_BYTES, turns.waiting_bytes)
        yield _one(metrics.SENT_BACK, counters.sent_back.count)
        yield _one(metrics.DEAD, counters.dead_letter.count)

    def _lags(self, rest: Rest) -> Iterator[Family]:
        yield metrics.LAG, ((key, self.lags.of(*key, rest)) for key in self.lags.pairs(rest))

    def _ages_of_lags(self, rest: Rest) -> Iterator[Family]:
        yield metrics.LAG_AGE, ((key, self._age_of_lag(*key, rest)) for key in self.lags.pairs(rest))

    def _oldest_in(self, group: str, queue: ConsumeQueue, ordinal: int) -> int | None:
        """Return when the message was stored whose age counts: those that are leased, delayed or lined say nothing."""
        figures = self.leases.of(GroupPartition(group, queue.topic, queue.partition))
        oldest = ordinal if figures is None else figures.first_ready
        return None if oldest is None else self.export.stored(queue, oldest)

    def _age_of_lag(self, group: str, topic: str, rest: Rest) -> float:
        times = [self._oldest_in(group, queue, ordinal) for queue, ordinal in self.lags.behind(group, topic, rest)]
        return self._seconds_since(min((time_ms for time_ms in times if time_ms is not None), default=None))

    def _leased(self, rest: Rest) -> Iterator[Family]:
        """Yield the figures of each group that leases messages, and topic. They are added up once, and not at one moment."""
        found = {key: self._sum(*key, rest) for key in self.leases.pairs()}
        yield metrics.LEASE_READY, ((key, sums.ready) for key, sums in found.items())
        yield metrics.LEASE_IN_FLIGHT, ((key, sums.in_flight) for key, sums in found.items())
        yield metrics.LEASE_DELAYED, ((key, sums.delayed) for key, sums in found.items())
        yield metrics.LEASE_LINED, ((key, sums.lined) for key, sums in found.items())
        yield metrics.LEASE_AGE, ((key, self._seconds_since(sums.oldest_ms)) for key, sums in found.items())
        counts = [(key, each) for key, each in with_rests(list(self.leases.leases.counts.pairs.items()), rest)]
        yield metrics.LEASE_GIVEN, ((key, each.given) for key, each in counts)
        yield metrics.LEASE_AGAIN, ((key, each.again) for key, each in counts)
        yield metrics.LEASE_DEAD, ((key, each.dead) for key, each in counts)

    def _sum(self, group: str, topic: str, rest: Rest) -> LeaseSums:
        places = with_rests(self.leases.partitions(group, topic), rest)
        return LeaseSums.of(filter(None, map(self.leases.of, places)))

    def _leases(self, rest: Rest) -> Iterator[Family]:
        figures, leases, counts = self.leases, self.leases.leases, self.leases.leases.counts
        yield _one(metrics.LEASE_ACKED, counts.acked)
        yield _one(metrics.LEASE_MEANINGLESS, counts.meaningless)
        yield _one(metrics.LEASE_OPEN, leases.open)
        yield _one(metrics.LEASE_HELD, figures.held_pops)
        yield _one(metrics.SUBSCRIPTIONS, figures.subscriptions)
        yield _one(metrics.LEASE_LOG, leases.log.size)
        yield _one(metrics.LEASE_SNAPSHOTS, leases.log.snapshots)
        yield _one(metrics.LEASE_UNKEPT, leases.unkept)

    def _readers(self, rest: Rest) -> Iterator[Family]:
        yield metrics.READER_LAG, self._reader_lags(rest)
        members = self.context.clients.consumer_groups()
        yield metrics.MEMBERS, (((group.name,), len(group.members)) for group in members)

    def _reader_lags(self, rest: Rest) -> Iterator[Sample]:
        queues = self.context.store.queues
        for (group, topic), asked in self.context.observed.table(rest).items():
            lag = 0
            for number, each in with_rests(asked.items(), rest):
                queue = queues.get(TopicPartition(topic, number))
                lag += 0 if queue is None else max(0, queue.readable_text_end - max(each.position, queue.first_position))
            yield (group, topic), lag

    def _reads(self, rest: Rest) -> Iterator[Family]:
        endpoint = self.endpoint
        kinds = Counter(type(session) for session in with_rests(list(endpoint.sessions), rest))
        known = {"text": kinds[TextSession], "remoting": kinds[RemotingSession]}
        silent = max(0, endpoint.connections - sum(known.values()))
        yield _one(metrics.HELD, self.holds.of_clients)
        yield _one(metrics.COLD, self.reads.cold_reads)
        yield _one(metrics.COLD_NOW, self.reads.waiting)
        yield metrics.CONNECTIONS, [((kind,), count) for kind, count in (*known.items(), ("none_yet", silent))]
        yield _one(metrics.CONNECTIONS_BYTES, endpoint.memory.held)
        yield _one(metrics.EVICTED, endpoint.memory.evicted)

    def _log(self, rest: Rest) -> Iterator[Family]:
        figures = StoreFigures.of(self.context.store)
        yield _one(metrics.LOG_BYTES, figures.end - figures.begin)
        yield _one(metrics.WRITTEN, figures.end - self._opened_at)
        yield _one(metrics.UNSYNCED, figures.end - figures.durable_end)

    def _age_of_log(self, rest: Rest) -> Iterator[Family]:
        yield _one(metrics.OLDEST, self._seconds_since(self.export.read_now(self._oldest_ms)))

    def _oldest_ms(self, read: Read) -> int | None:
        """Return when the log's first message was stored.

        It is read only once: a damaged one would be counted at each scrape.
        """
        store = self.context.store
        begin, damaged = store.log.begin, store.reader.damaged
        if self._oldest[0] != begin:
            stored = store.record_at_offset(begin, read)
            if stored is None and store.reader.damaged == damaged:  # there is no readable message
                return None
            self._oldest = begin, None if stored is None else store_ms(stored.buffer[stored.at :])
        return self._oldest[1]

    def _disk(self, rest: Rest) -> Iterator[Family]:
        store = self.context.store
        usage = self.run(partial(store.disk.usage, store.directory))
        yield _one(metrics.DISK_FREE, usage.available)
        yield _one(metrics.DISK_USED, usage.ratio)

    def _store(self, rest: Rest) -> Iterator[Family]:
        figures = StoreFigures.of(self.context.store)
        yield _one(metrics.WRITABLE, self.context.replicas.is_master and self._refusal() is None)
        yield _one(metrics.KEYS_BEHIND, figures.index_behind_bytes)
        yield _one(metrics.KEYS_PAUSED, figures.index_paused is not None)
        yield _one(metrics.DAMAGED, figures.damaged_reads)

    def _sizes(self, rest: Rest) -> Iterator[Family]:
        yield _one(metrics.PARTITIONS, len(self.context.store.queues))
        yield _one(metrics.TOPICS, len(self.context.topics))
        yield _one(metrics.GROUPS, len(self.context.groups))

    def _delays(self, rest: Rest) -> Iterator[Family]:
        yield metrics.DELAYED, self._delayed()
        yield _one(metrics.TIMERS, self.timers.pending)
        yield _one(metrics.TIMERS_LATE, self.timers.late_ms / 1000)
        yield _one(metrics.TIMERS_DELIVERED, self.timers.delivered)
        yield _one(metrics.TIMERS_CANCELLED, self.timers.cancelled)
        yield _one(metrics.TIMERS_DROPPED, self.timers.dropped)
        yield _one(metrics.RECURRING, self.timers.recurring)
        yield _one(metrics.RECURRING_DROPPED, self.timers.runs_dropped)

    def _ids(self, rest: Rest) -> Iterator[Family]:
        yield _one(metrics.DUPLICATES, self.dedupe.duplicates)
        yield _one(metrics.DEDUPE_WAITING, self.dedupe.waiting)
        yield _one(metrics.DEDUPE_BEHIND, self.dedupe.behind_bytes)
        yield _one(metrics.DEDUPE_BYTES, self.dedupe.index_bytes)

    def _delayed(self) -> Iterator[Sample]:
        for level, position in self.positions().items():
            queue = self.context.store.queues.get(TopicPartition(SCHEDULE_TOPIC, level - 1))
            yield (str(level),), 0 if queue is None else max(0, queue.readable - position)

    def _transactions(self, rest: Rest) -> Iterator[Family]:
        numbers = self.export.read_now(self.transactions)
        yield from (_one(metric, _whole(numbers[name])) for name, metric in metrics.OF_TRANSACTIONS.items())

    def _replicas(self, rest: Rest) -> Iterator[Family]:
        settings, health, is_master = self.context.settings, self.context.replicas.health(), self.context.replicas.is_master
        yield _one(metrics.MASTER, is_master)
        yield _one(metrics.EPOCH, self.context.epochs.current.number)
        yield _one(metrics.IN_SYNC, health.in_sync)
        yield _one(metrics.LEAST_IN_SYNC, settings.min_in_sync if settings.durability.on_replicas else 1)
        lags: Sequence[Sample] = [((str(slave.replica),), slave.lag_bytes) for slave in health.slaves]
        yield metrics.REPLICA_LAG, lags if is_master else [((str(settings.replica_number),), health.lag_bytes)]
        caught_up = [slave for slave in health.slaves if slave.lag_ms >= 0]
        yield metrics.REPLICA_LAG_AGE, [((str(slave.replica),), slave.lag_ms / 1000) for slave in caught_up]
        yield metrics.REPLICA_IN_SYNC, [((str(slave.replica),), slave.in_sync) for slave in health.slaves]

    def _registries(self, rest: Rest) -> Iterator[Family]:
        yield _one(metrics.REGISTERED, self.registered() is None)
        if self.registry is not None:
            yield from registry_families(self.registry)

    def _seconds_since(self, time_ms: int | None) -> float:
        return 0.0 if time_ms is None else max(0, self.context.store.clock.now_ms() - time_ms) / 1000


def registry_families(registry: Registry) -> Iterator[Family]:
    """Yield the metrics of a registry, embedded or not."""
    tables = registry.tables
    yield _one(metrics.REGISTRY_TOPICS, len(tables.topics()))
    yield _one(metrics.REGISTRY_BROKERS, sum(len(broker.addresses) for broker in tables.cluster_info().brokers.values()))


def _one(metric: Metric, value: float) -> Family:
    """Return a metric without labels, with its value."""
    return metric, [((), value)]


def _reason(error: type[MetaqError]) -> str:
    """Return an error class's name as a label value: DiskFull as ``disk_full``."""
    return _HUMP.sub("_", error.__name__).lower()


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value
