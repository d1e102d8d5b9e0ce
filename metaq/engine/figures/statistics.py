"""Statistics of puts and gets over time: by topic, by group and topic, and in all.

Totals are sampled every ``SAMPLE_S`` and kept in three rings: the last minute, hour and day. A rate covers the time since the
oldest sample of its ring, so "the last minute" is between 60 and 70 seconds. Puts are not counted at all: the consume queues
know their number and size.

==============================================  ===============  ====================================
name (specs: remoting protocol, section 3.3)    key              counts
==============================================  ===============  ====================================
TOPIC_PUT_NUMS, TOPIC_PUT_SIZE                  topic            messages, and bytes of their bodies
GROUP_GET_NUMS, GROUP_GET_SIZE                  topic@group      messages and bytes got
SNDBCK_PUT_NUMS                                 topic@group      messages sent back by consumers
BROKER_PUT_NUMS, BROKER_GET_NUMS                (any)            messages in all
==============================================  ===============  ====================================
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from metaq.clock import Clock
from metaq.engine.figures.counters import Counters
from metaq.engine.tables.observed import LONGEST_GROUP
from metaq.message import INTERNAL_TOPICS, TopicPartition
from metaq.protocol.remoting.adminbodies import Rate, Rates
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.queues.consumequeue import ConsumeQueue

SAMPLE_S: Final = 10
MOST_KEYS: Final = 20_000
"""Pairs of group and topic that are counted one by one; messages of more pairs are only counted in all."""
OTHERS: Final = "(others)"
"""The topic and the group under which the rest is listed that is only counted in all: no topic can have this name."""
SLICE: Final = 256
"""Totals that are sampled without a pause, about 2 ms of work."""
DAY_MS: Final = 86_400_000

_EVERY: Final = (1, 60, 360)
"""For each ring, how many samplings lie between two of its samples: 10 s, 10 min, 1 h."""
_KEPT: Final = (7, 7, 25)
"""The number of samples in each ring: a minute, an hour, a day."""

PUT: Final = "put"
GOT: Final = "got"
SENT_BACK: Final = "sent back"
BROKER: Final = "broker"
ASKED: Final = "asked"
MISSED: Final = "missed"
"""``ASKED`` are all gets and pulls, ``MISSED`` those that found nothing."""

_NAMES: Final = {
    "TOPIC_PUT_NUMS": (PUT, 0),
    "TOPIC_PUT_SIZE": (PUT, 1),
    "GROUP_GET_NUMS": (GOT, 0),
    "GROUP_GET_SIZE": (GOT, 1),
    "SNDBCK_PUT_NUMS": (SENT_BACK, 0),
    "BROKER_PUT_NUMS": (BROKER, 0),
    "BROKER_GET_NUMS": (BROKER, 0),
}
"""By RocketMQ's name: the kind of count, and 0 for messages or 1 for bytes."""


class Totals(NamedTuple):
    """Messages and bytes counted since the start."""

    messages: int = 0
    size: int = 0


NOTHING: Final = Totals()


class Sample(NamedTuple):
    """The totals at one moment, in monotonic seconds."""

    at_s: float
    totals: Totals


class Day(NamedTuple):
    """The totals since the start, as they were at the last two midnights (UTC)."""

    yesterday: Totals
    today: Totals


class _Counter:
    """A pair of totals that is counted as things happen."""

    __slots__ = ("messages", "size")

    def __init__(self) -> None:
        self.messages = self.size = 0

    def totals(self) -> Totals:
        return Totals(self.messages, self.size)


class Series:
    """The past samples of one count, in three rings."""

    __slots__ = ("_rings",)

    def __init__(self, since: Sample) -> None:
        self._rings = tuple([since] for _ in _EVERY)

    def take(self, sampling: int, sample: Sample) -> None:
        """Add a sample to the rings that take one at the sampling with this number."""
        for ring, every, kept in zip(self._rings, _EVERY, _KEPT, strict=True):
            if sampling % every == 0:
                ring.append(sample)
                del ring[:-kept]

    @property
    def newest(self) -> Sample:
        """The newest sample."""
        return self._rings[0][-1]

    def rates(self, now: Sample, what: int) -> Rates:
        """Return the rates of messages (0) or bytes (1) in the last minute, hour and day, up to now."""
        return Rates(*(_rate(ring[0], now, what) for ring in self._rings))

    def per_second(self, now: Sample) -> tuple[float, float, float]:
        """Return the messages a second in the last 10 to 20 seconds, the last minute, and the last 10 to 20 minutes."""
        minute, hour, _ = self._rings
        ten_s, one_min, ten_min = (_rate(since, now, 0) for since in (minute[-2:][0], minute[0], hour[-2:][0]))
        return ten_s.per_second, one_min.per_second, ten_min.per_second


def _rate(since: Sample, now: Sample, what: int) -> Rate:
    counted = now.totals[what] - since.totals[what]
    messages = now.totals.messages - since.totals.messages
    elapsed_s = now.at_s - since.at_s
    return Rate(counted, counted / elapsed_s if elapsed_s > 0 else 0.0, counted / messages if messages else 0.0)


class Statistics:
    """The statistics of one broker."""

    def __init__(self, queues: Mapping[TopicPartition, ConsumeQueue], clock: Clock, counters: Counters) -> None:
        self._queues = queues
        self._counters = counters
        self._clock = clock
        self._by_topic: dict[str, list[ConsumeQueue]] = {}
        self._indexed = 0  # number of queues in it: new ones come at the end, and none is ever removed
        self._put_before: dict[str, Totals] = {}
        self._got: dict[tuple[str, str], _Counter] = {}
        self._sent_back: dict[tuple[str, str], _Counter] = {}
        self._beyond = _Counter()  # got, but counted only in all
        self._series: dict[tuple[str, str], Series] = {}
        self._sampling = 0
        self._sampled_s = clock.monotonic()
        self._day = clock.now_ms() // DAY_MS
        self.put_by_day = self.got_by_day = Day(Totals(), Totals())

    def begin(self) -> None:
        """Count puts from now on only: leave out the messages that readers can see already."""
        self._put_before = {topic: _put_ever(partitions) for topic, partitions in self._topics().items()}

    # -- counting -----------------------------------------------------------------------------------------------------

    def got(self, group: str, topic: str, messages: int, size: int) -> None:
        """Count messages, and their bytes, that a consumer received."""
        counter = self._got.get((topic, group)) or self._counter(self._got, (topic, group))
        counter.messages += messages
        counter.size += size

    def sent_back(self, group: str, topic: str) -> None:
        """Count a message that a consumer sent back."""
        counter = self._sent_back.get((topic, group)) or self._counter(self._sent_back, (topic, group))
        counter.messages += 1

    def _counter(self, counters: dict[tuple[str, str], _Counter], key: tuple[str, str]) -> _Counter:
        if len(counters) >= MOST_KEYS or len(key[1]) > LONGEST_GROUP:
            return self._beyond if counters is self._got else _Counter()
        return counters.setdefault(key, _Counter())

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Forget the counts of a topic or a group that was deleted; the messages got stay in the totals."""
        for counters in (self._got, self._sent_back):
            for key in [key for key in counters if topic == key[0] or group == key[1]]:
                counter = counters.pop(key)
                if counters is self._got:
                    self._beyond.messages += counter.messages
                    self._beyond.size += counter.size
                self._series.pop((GOT if counters is self._got else SENT_BACK, _written(key)), None)

    # -- totals -------------------------------------------------------------------------------------------------------

    def _topics(self) -> dict[str, list[ConsumeQueue]]:
        """Return the queues by topic."""
        if self._indexed < len(self._queues):
            for queue in islice(self._queues.values(), self._indexed, None):
                self._by_topic.setdefault(queue.topic, []).append(queue)
            self._indexed = len(self._queues)
        return self._by_topic

    def put_to(self, topic: str) -> Totals:
        """Return the messages put into one topic since the start."""
        messages, size = _put_ever(self._topics().get(topic, []))
        before = self._put_before.get(topic, NOTHING)
        return Totals(messages - before.messages, size - before.size)

    def topics(self) -> list[str]:
        """Return all topics that have a partition, internal ones included."""
        return list(self._topics())

    def got_by_group(self) -> Iterator[tuple[tuple[str, str], Totals]]:
        """Yield the messages got since the start, by topic and group; the last item, named ``OTHERS`` twice, is all the rest.

        The caller may let other greenlets run between any two items.
        """
        for key in list(self._got):
            counter = self._got.get(key)
            if counter is not None:  # else it was forgotten meanwhile
                yield key, counter.totals()
        yield (OTHERS, OTHERS), self._beyond.totals()

    def put_in_all(self) -> Totals:
        """Return the messages that clients put since the start; internal topics do not count."""
        return _sum(self.put_to(topic) for topic in self._topics() if topic not in INTERNAL_TOPICS)

    def got_in_all(self) -> Totals:
        """Return the messages that clients got since the start."""
        return _sum([self._beyond.totals(), *(counter.totals() for counter in self._got.values())])

    def _totals(self) -> Iterator[tuple[tuple[str, str], Totals]]:
        """Yield all totals that are sampled, each as it is when its turn comes."""
        put: list[Totals] = []
        for topic in list(self._topics()):
            totals = self.put_to(topic)
            if topic not in INTERNAL_TOPICS:
                put.append(totals)
            yield (PUT, topic), totals
        for kind, counters in ((GOT, self._got), (SENT_BACK, self._sent_back)):
            for key in list(counters):
                if key in counters:  # else it was forgotten meanwhile
                    yield (kind, _written(key)), counters[key].totals()
        yield (BROKER, PUT), _sum(put)
        yield (BROKER, GOT), self.got_in_all()
        yield (BROKER, ASKED), Totals(self._counters.get.count)
        yield (BROKER, MISSED), Totals(self._counters.get_miss.count)

    def _now(self, totals: Totals) -> Sample:
        return Sample(self._clock.monotonic(), totals)

    # -- sampling and asking ------------------------------------------------------------------------------------------

    def sample(self, rest: Callable[[], None]) -> None:
        """Sample all totals; called every ``SAMPLE_S``. ``rest`` is called after each ``SLICE`` of them, to let others run."""
        self._sampling += 1
        at_s = self._clock.monotonic()
        for number, (key, totals) in enumerate(self._totals(), 1):
            if totals != NOTHING:
                self._past(key).take(self._sampling, Sample(at_s, totals))
            if number % SLICE == 0:
                rest()
        self._sampled_s = at_s
        day = self._clock.now_ms() // DAY_MS
        if day != self._day:
            self._day = day
            self.put_by_day = Day(self.put_by_day.today, self.put_in_all())
            self.got_by_day = Day(self.got_by_day.today, self.got_in_all())

    def sampled(self) -> tuple[Sample, Sample]:
        """Return the messages put and got in all, as they were sampled last."""
        return self._past((BROKER, PUT)).newest, self._past((BROKER, GOT)).newest

    def _past(self, key: tuple[str, str]) -> Series:
        """Return the series of one count; a new one starts from zero at the time of the last sampling."""
        series = self._series.get(key)
        if series is None:
            self._series[key] = series = Series(Sample(self._sampled_s, NOTHING))
        return series

    def rates(self, name: str, key: str) -> Rates | None:
        """Return the rates of a statistic by its RocketMQ name; ``None`` when it is unknown, or nothing was counted yet."""
        kind, what = _NAMES.get(name, (None, 0))
        if kind is None:
            return None
        if kind == BROKER:
            key = PUT if name == "BROKER_PUT_NUMS" else GOT
            totals = self.put_in_all() if key == PUT else self.got_in_all()
        elif kind == PUT:
            totals = self.put_to(key)
        else:
            topic, _, group = key.partition("@")
            counter = (self._got if kind == GOT else self._sent_back).get((topic, group))
            totals = NOTHING if counter is None else counter.totals()
        if totals == NOTHING and kind != BROKER:
            return None
        return self._past((kind, key)).rates(self._now(totals), what)

    def got_per_second(self, group: str, topic: str) -> float:
        """Return the messages a second that a group got from a topic in the last 10 to 20 seconds."""
        counter = self._got.get((topic, group))
        if counter is None:
            return 0.0
        return self._past((GOT, _written((topic, group)))).per_second(self._now(counter.totals()))[0]

    def put_per_second(self) -> tuple[float, float, float]:
        """Return the messages put per second, over the times of ``Series.per_second``."""
        return self._past((BROKER, PUT)).per_second(self._now(self.put_in_all()))

    def transferred_per_second(self) -> tuple[float, float, float]:
        """Return the messages got per second, over the times of ``Series.per_second``."""
        return self._past((BROKER, GOT)).per_second(self._now(self.got_in_all()))

    def asked_per_second(self) -> tuple[float, float, float]:
        """Return the gets and pulls per second, over the times of ``Series.per_second``."""
        return self._past((BROKER, ASKED)).per_second(self._now(Totals(self._counters.get.count)))

    def missed_per_second(self) -> tuple[float, float, float]:
        """Return the gets and pulls per second that found nothing, over the times of ``Series.per_second``."""
        return self._past((BROKER, MISSED)).per_second(self._now(Totals(self._counters.get_miss.count)))


def _put_ever(queues: Iterable[ConsumeQueue]) -> Totals:
    messages = size = 0
    for queue in queues:
        messages += queue.readable
        size += queue.readable_text_end
    return Totals(messages, size - HEADER_SIZE_TEXT * messages)


def _written(key: tuple[str, str]) -> str:
    """Return ``topic@group``, as administrators write it."""
    return "@".join(key)


def _sum(totals: Iterable[Totals]) -> Totals:
    messages = size = 0
    for one in totals:
        messages += one.messages
        size += one.size
    return Totals(messages, size)
