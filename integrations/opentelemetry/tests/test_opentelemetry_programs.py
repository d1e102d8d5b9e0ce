"""Programs with spans, and a real broker: several services, one that opentelemetry-instrument starts, and the README's."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging
from fastapi import FastAPI
from fastapi.testclient import TestClient
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry_metaq import MetaqInstrumentor

import metaq
from tests.docs.examples import fences
from tests.support.broker import BrokerProcess, wait_until

WAIT_S: Final = 120.0
PAGE: Final = "docs/opentelemetry.md"
README: Final = "integrations/opentelemetry/README.md"
ADDRESS: Final = "127.0.0.1:9876"
FIRST: Final = metaq.ConsumeFrom.FIRST

PLAIN: Final = """
import sys
import metaq
import metaq.aio
import metaq.testing

with metaq.testing.broker() as broker, metaq.connect(broker.address) as client:
    client.producer().send("orders", b"1")
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def run(*command: str, **environment: str) -> str:
    """Return the standard output of a program that must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("METAQ_", "OTEL_"))}
    done = subprocess.run(command, capture_output=True, text=True, env={**kept, **environment}, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def keep_logging(**_: object) -> None:
    """Stand in for Celery's own set-up of logging, which would last longer than its worker."""


@contextmanager
def traced() -> Iterator[tuple[InMemorySpanExporter, TracerProvider]]:
    """What metaq and Celery do in this process is traced until the block is left."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentors = (MetaqInstrumentor(), CeleryInstrumentor())
    setup_logging.connect(keep_logging)
    for instrumentor in instrumentors:
        instrumentor.instrument(tracer_provider=provider)
    try:
        yield exporter, provider
    finally:
        for instrumentor in instrumentors:
            instrumentor.uninstrument()
        setup_logging.disconnect(keep_logging)


def test_a_trace_through_services(process: BrokerProcess) -> None:
    """It begins with a request, and leads over a message, a Celery task and a second message to a consumer group."""
    with (
        traced() as (exporter, provider),
        metaq.connect(process.registry) as client,
        Celery("shop", broker=f"metaq://{process.registry}//") as tasks,
    ):
        producer = client.producer()
        app = FastAPI()

        @app.post("/parcels/{number}")
        def take_parcel(number: int) -> None:
            producer.send("parcels", b"%d" % number)

        def make_label(number: str) -> None:
            producer.send("labels", number.encode())

        label = tasks.task(name="label")(make_label)

        def pack(message: metaq.ReceivedMessage) -> None:
            label.delay(message.body.decode())

        FastAPIInstrumentor.instrument_app(app, tracer_provider=provider)
        with TestClient(app) as browser:
            assert browser.post("/parcels/2003").status_code == 200
        with (
            start_worker(tasks, pool="solo", perform_ping_check=False, shutdown_timeout=WAIT_S),
            client.listen("parcels", "packing", pack, consume_from=FIRST),
            client.lease_consumer("labels", "printing", from_first=True) as printing,
        ):

            def print_label(message: metaq.LeasedMessage) -> None:
                threading.Thread(target=printing.close).start()

            printing.run(print_label, concurrency=1)
            wait_until(lambda: {"ack labels", "ack celery"} <= names(exporter), WAIT_S, "the acks have their spans")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    path = ["POST /parcels/{number}", "send parcels", "process parcels", "apply_async/label", "run/label"]
    path += ["send labels", "process labels", "ack labels"]
    assert [parent_id(spans[name]) for name in path] == [None, *(span_id(spans[name]) for name in path[:-1])]
    kinds = [spans[name].kind for name in path]
    assert kinds == [SpanKind.SERVER, *[SpanKind.PRODUCER, SpanKind.CONSUMER] * 3, SpanKind.CLIENT]
    assert parent_id(spans["send celery"]) == span_id(spans["apply_async/label"])


def names(exporter: InMemorySpanExporter) -> set[str]:
    return {span.name for span in exporter.get_finished_spans()}


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def test_opentelemetry_instrument_finds_it(process: BrokerProcess, tmp_path: Path) -> None:
    """The program of the page, which does not configure anything, is traced, also its loop."""
    (shown,) = fences(PAGE, "python")
    program = tmp_path / "program.py"
    text = shown.text.replace(ADDRESS, process.registry)
    for name, own in (("orders", "letters"), ("bills", "receipts"), ("billing", "posting")):  # the README has those
        text = text.replace(name, own)
    program.write_text(text, "utf-8")
    command = Path(sys.executable).with_name("opentelemetry-instrument")
    exporters = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    printed = run(str(command), sys.executable, str(program), **exporters)
    spans: dict[str, Any] = {}
    while printed := printed.lstrip():
        span, end = json.JSONDecoder().raw_decode(printed)
        spans[span["name"]] = span
        printed = printed[end:]
    assert set(spans) == {"send letters", "receive letters", "process letters", "send receipts", "ack letters"}
    assert spans["process letters"]["parent_id"] == spans["send letters"]["context"]["span_id"]
    assert spans["ack letters"]["parent_id"] == spans["process letters"]["context"]["span_id"]
    assert spans["process letters"]["attributes"]["messaging.consumer.group.name"] == "posting"


def test_the_readme(process: BrokerProcess) -> None:
    """Its program prints what it shows."""
    (program,) = fences(README, "python")
    (shown,) = fences(README, "text")
    assert ADDRESS in program.text
    assert run(sys.executable, "-c", program.text.replace(ADDRESS, process.registry)) == shown.text


def test_metaq_knows_nothing_of_opentelemetry() -> None:
    """No module of it is imported, although it is installed."""
    assert run(sys.executable, "-c", PLAIN) == "[]\n"
