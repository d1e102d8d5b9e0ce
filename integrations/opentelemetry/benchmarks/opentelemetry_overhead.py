"""The cost of tracing for a send:

    PYTHONPATH=. python integrations/opentelemetry/benchmarks/opentelemetry_overhead.py

Starts brokers. One client sends in many short rounds, by turns without an interceptor, with spans for a batch processor
that drops them, with a sampler that takes none, and with nothing but a span of the SDK around each send, which carries no
context: the least that any tracing costs. It prints the microseconds of a send, by the clock and by the client's
processor time, as medians of the rounds, and what tracing adds as the median of the ratios of neighbouring rounds; it writes
that to ``benchmarks/results``, as ``python -m benchmarks`` does, in two minutes. Only the clock says what a send takes longer,
and only on a machine that does nothing else. The client and the broker run in the form that is installed.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, Tracer
from opentelemetry_metaq import MetaqInstrumentor
from rich.console import Console

import metaq
from benchmarks.figures import Check
from benchmarks.report import Report, Table, describe_machine, print_report, save
from metaq.message import Durability
from tests.support.broker import BrokerProcess

RESULTS: Final = Path(__file__).parents[3] / "benchmarks" / "results"
SECONDS: Final = 24.0
"""The time of all rounds of one way to send."""
SENDS: Final = 100
BODY: Final = bytes(100)
MOST: Final = 15.0
"""The most that spans may add to a send, in hundredths."""
OFF: Final = "no interceptor"
SPANS: Final = "spans"
UNSAMPLED: Final = "not sampled"
BARE: Final = "bare spans"
ATTRIBUTES: Final = {
    "messaging.system": "metaq",
    "messaging.operation.name": "send",
    "messaging.operation.type": "send",
    "messaging.destination.name": "orders",
}
Work = Callable[[], None]


class Dropping(SpanExporter):
    """Takes spans as one that sends them would, and drops them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Cost(NamedTuple):
    """The microseconds of a send."""

    clock: float
    processor: float


class Row(NamedTuple):
    """The costs of a way to send, and what is added to them in hundredths: spans that are sampled or not, and bare ones."""

    name: str
    off: float
    on: float
    more: float
    more_unsampled: float
    more_bare: float

    @property
    def cells(self) -> list[str]:
        added = [f"{each:+.1f} %" for each in (self.more, self.more_unsampled, self.more_bare)]
        return [self.name, f"{self.off:.1f}", f"{self.on:.1f}", *added]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sampled, unsampled = TracerProvider(), TracerProvider(sampler=ALWAYS_OFF)
    sampled.add_span_processor(BatchSpanProcessor(Dropping()))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        machine = describe_machine(Path(place), [])
        for durability in (Durability.MEMORY, Durability.DISK):
            data = Path(place) / durability
            with BrokerProcess(data, durability=durability) as broker, metaq.connect(broker.registry) as client:
                for name, (work, bare) in ways(client.producer(), sampled.get_tracer("bare")).items():
                    costs = measured(work, bare, {SPANS: sampled, UNSAMPLED: unsampled}, arguments.seconds)
                    rows += rows_of(f"{name}, {durability.upper()}", costs)
    sampled.shutdown()
    made = Report(
        "opentelemetry",
        {
            "rounds": f"of {SENDS} sends of {len(BODY)} B from one thread, {arguments.seconds:g} s for each way, in turn",
            "figures": "µs of a send, medians; what is added is the median of the ratios of neighbouring rounds",
        },
        [Table("A send", ["µs", OFF, SPANS, "spans add", "not sampled adds", "bare spans add"], [row.cells for row in rows])],
        [
            Check(f"{row.name}: added by spans", row.more, "at most", must=MOST, unit="%")
            for row in rows
            if row.name.startswith("send,") and "clock" in row.name
        ],
        [row._asdict() for row in rows],
    )
    print_report(made, Console())
    print(save(made, machine, arguments.out))


def ways(producer: metaq.Producer, tracer: Tracer) -> dict[str, tuple[Work, Work]]:
    """Return the ways to send, by name: without, and with a span of a tracer around each send."""

    def send() -> None:
        for _ in range(SENDS):
            producer.send("orders", BODY)

    def send_bare() -> None:
        for _ in range(SENDS):
            span = tracer.start_span("send orders", kind=SpanKind.PRODUCER, attributes=ATTRIBUTES)
            producer.send("orders", BODY)
            span.end()

    def send_async() -> None:
        for future in [producer.send_async("orders", BODY) for _ in range(SENDS)]:
            future.result()

    def send_async_bare() -> None:
        begun = []
        for _ in range(SENDS):
            span = tracer.start_span("send orders", kind=SpanKind.PRODUCER, attributes=ATTRIBUTES)
            begun.append((producer.send_async("orders", BODY), span))
        for future, span in begun:
            future.result()
            span.end()

    return {"send": (send, send_bare), "send_async": (send_async, send_async_bare)}


def measured(work: Work, bare: Work, providers: dict[str, TracerProvider], seconds: float) -> dict[str, list[Cost]]:
    """Return the costs of rounds without an interceptor, with spans of each provider, and with bare spans.

    Every second turn goes backwards.
    """
    found: dict[str, list[Cost]] = defaultdict(list)
    turn: list[str] = [OFF, *providers, BARE]
    until = time.monotonic() + seconds
    work()
    while time.monotonic() < until or not found:
        for name in turn:
            if name in (OFF, BARE):
                found[name].append(timed(work if name == OFF else bare))
                continue
            MetaqInstrumentor().instrument(tracer_provider=providers[name])
            found[name].append(timed(work))
            MetaqInstrumentor().uninstrument()
        turn.reverse()
    return found


def timed(work: Work) -> Cost:
    """Return the cost of one send."""
    began, processor = time.perf_counter(), time.process_time()
    work()
    return Cost(1e6 * (time.perf_counter() - began) / SENDS, 1e6 * (time.process_time() - processor) / SENDS)


def rows_of(name: str, costs: dict[str, list[Cost]]) -> list[Row]:
    """Return the costs of a way by the clock and by processor time."""
    rows = []
    for index, measure in enumerate(("by the clock", "processor time")):
        off, on, unsampled, bare = ([cost[index] for cost in costs[each]] for each in (OFF, SPANS, UNSAMPLED, BARE))
        middle = statistics.median
        added = more(off, on), more(off, unsampled), more(off, bare)
        rows.append(Row(f"{name}, {measure}", middle(off), middle(on), *added))
    return rows


def more(before: Sequence[float], after: Sequence[float]) -> float:
    """Return by how many hundredths rounds cost more than their neighbours."""
    return 100 * (statistics.median(each / other for each, other in zip(after, before, strict=True)) - 1)


if __name__ == "__main__":
    main()
