"""The cost of tracing for a send: python integrations/opentelemetry/benchmarks/opentelemetry_overhead.py

Starts brokers, and sends with one client in many short rounds, by turns without an interceptor and with spans for a batch
processor which drops them. It prints the microseconds of a send, wall time and processor time of the client, as medians of the
rounds, and the median of the ratios of neighbouring rounds. Wall time assumes a machine that does nothing else. PYTHONPATH must
have the root of the repository.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry_metaq import MetaqInstrumentor

import metaq
from tests.support.broker import BrokerProcess

ROUNDS: Final = 201
SENDS: Final = 100
BODY: Final = bytes(100)


class Dropping(SpanExporter):
    """Takes spans as one that sends them would, and drops them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Cost(NamedTuple):
    """The microseconds of a send."""

    wall: float
    cpu: float


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Dropping()))
    for durability in ("memory", "disk"):
        with (
            tempfile.TemporaryDirectory() as place,
            BrokerProcess(Path(place) / "data", durability=durability) as broker,
            metaq.connect(broker.registry) as client,
        ):
            producer = client.producer()

            def send(producer: metaq.Producer = producer) -> None:
                for _ in range(SENDS):
                    producer.send("orders", BODY)

            def send_async(producer: metaq.Producer = producer) -> None:
                for future in [producer.send_async("orders", BODY) for _ in range(SENDS)]:
                    future.result()

            report(f"send, {durability}", send, provider)
            report(f"send_async, {durability}", send_async, provider)
    provider.shutdown()


def report(name: str, work: Callable[[], None], provider: TracerProvider) -> None:
    """Print the costs of one way to send."""
    work()
    off, on = [], []
    for _ in range(ROUNDS):
        off.append(timed(work))
        MetaqInstrumentor().instrument(tracer_provider=provider)
        on.append(timed(work))
        MetaqInstrumentor().uninstrument()
    for what, plain, traced in (
        ("wall", [cost.wall for cost in off], [cost.wall for cost in on]),
        ("cpu", [cost.cpu for cost in off], [cost.cpu for cost in on]),
    ):
        more = statistics.median(after / before for before, after in zip(plain, traced, strict=True)) - 1
        medians = f"off {statistics.median(plain):7.1f} µs   on {statistics.median(traced):7.1f} µs"
        print(f"{name:20} {what:5} {medians}   {100 * more:+6.1f} %", flush=True)


def timed(work: Callable[[], None]) -> Cost:
    """Return the cost of one send."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(1e6 * (time.perf_counter() - began) / SENDS, 1e6 * (time.process_time() - cpu) / SENDS)


if __name__ == "__main__":
    main()
