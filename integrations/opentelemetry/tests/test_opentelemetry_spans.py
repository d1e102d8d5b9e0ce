"""The spans of each operation, by OpenTelemetry's conventions, with the broker in memory."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.instrumentation.utils import suppress_instrumentation
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import CarrierT, Setter, TextMapPropagator, default_setter
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry_metaq import MetaqInstrumentor, names, process
from opentelemetry_metaq.tracing import Tracing

import metaq
from metaq.message import QueueOffset
from metaq.testing import InMemoryBroker, broker
from tests.support.broker import wait_until

WAIT_S: Final = 60.0
FIRST: Final = metaq.ConsumeFrom.FIRST
GIVEN: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""A creation context that a program sets itself."""


class Spans:
    """The spans that have ended, by their names."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("tests")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def wait(self, name: str, count: int = 1) -> list[ReadableSpan]:
        wait_until(lambda: len(self.named(name)) >= count, WAIT_S, f"{count} spans {name}")
        found = self.named(name)
        assert len(found) == count
        return found

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.wait(name)
        return span


def context_of(span: ReadableSpan) -> SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent(span: ReadableSpan) -> int | None:
    """Return the id of the span's parent."""
    return None if span.parent is None else span.parent.span_id


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def ids(*spans: ReadableSpan) -> list[int]:
    return [context_of(span).span_id for span in spans]


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    MetaqInstrumentor().instrument(tracer_provider=spans.provider)
    yield spans
    MetaqInstrumentor().uninstrument()


@pytest.fixture
def memory() -> Iterator[InMemoryBroker]:
    with broker() as memory:
        yield memory


@pytest.fixture
def client(memory: InMemoryBroker) -> Iterator[metaq.Client]:
    with metaq.connect(memory.address) as client:
        client.admin().create_topic("orders", 1)
        yield client


def received(client: metaq.Client, count: int = 1) -> list[metaq.ReceivedMessage]:
    """Return so many messages of the topic, read without a span."""
    with suppress_instrumentation(), client.consumer("orders", "readers", consume_from=FIRST) as consumer:
        found = [consumer.receive(WAIT_S) for _ in range(count)]
    return [message for message in found if message is not None]


def test_the_names_are_those_of_the_conventions() -> None:
    """All but our own, as the installed package has them."""
    known = {value for value in vars(messaging_attributes).values() if isinstance(value, str)} | {error_attributes.ERROR_TYPE}
    ours = {value for name, value in vars(names).items() if name.isupper() and name != "SCHEMA_URL"}
    assert {name for name in ours - known if not name.startswith("messaging.metaq.")} == set()


def test_a_send(spans: Spans, client: metaq.Client) -> None:
    """A span of a producer, a child of the current one, whose context the message carries, with the baggage."""
    with spans.tracer.start_as_current_span("request") as request:
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        sent = client.producer().send("orders", b"1", tag="paid", keys=("2003", "2004"), properties={"own": "1"})
        context.detach(token)
    span = spans.one("send orders")
    assert span.kind is SpanKind.PRODUCER
    assert span.status.status_code is StatusCode.UNSET
    assert parent(span) == request.get_span_context().span_id
    assert attributes(span) == {
        "messaging.system": "metaq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": f"{sent.queue.broker_name}-0",
        "messaging.client.id": client.id,
        "messaging.message.id": sent.id,
        "messaging.metaq.message.tag": "paid",
        "messaging.metaq.message.keys": "2003 2004",
    }
    (message,) = received(client)
    trace_id, span_id = context_of(span).trace_id, context_of(span).span_id
    assert message.properties["traceparent"].startswith(f"00-{trace_id:032x}-{span_id:016x}-")
    assert message.properties["baggage"] == "tenant=acme"
    assert message.properties["own"] == "1"
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.schema_url == names.SCHEMA_URL


@pytest.mark.parametrize("state", [None, TraceState([("vendor", "1"), ("other", "2")])])
@pytest.mark.parametrize("flags", [TraceFlags.DEFAULT, TraceFlags.SAMPLED])
def test_messages_carry_what_the_propagator_writes(client: metaq.Client, flags: int, state: TraceState | None) -> None:
    """It is written without the propagator, when that is the default one."""
    remote = NonRecordingSpan(SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(flags), trace_state=state))
    expected: dict[str, str] = {}
    MetaqInstrumentor().instrument(tracer_provider=trace.NoOpTracerProvider())
    token = context.attach(trace.set_span_in_context(remote))
    try:
        propagate.inject(expected)
        client.producer().send("orders", b"1")
    finally:
        context.detach(token)
        MetaqInstrumentor().uninstrument()
    (message,) = received(client)
    assert {name: value for name, value in message.properties.items() if name.startswith("trace")} == expected


class Own(TextMapPropagator):
    """A propagator that a program sets."""

    def inject(self, carrier: CarrierT, context: Context | None = None, setter: Setter[CarrierT] = default_setter) -> None:
        setter.set(carrier, "own-trace", f"{trace.get_current_span(context).get_span_context().span_id:x}")

    def extract(self, carrier: object, context: Context | None = None, getter: object = None) -> Context:
        return Context()

    @property
    def fields(self) -> set[str]:
        return {"own-trace"}


class OwnOfDefaults(CompositePropagator):
    """One that is made of the default parts, and does something else. It has no hash."""

    inject = Own.inject
    extract = Own.extract
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "own",
    [Own(), OwnOfDefaults([TraceContextTextMapPropagator(), W3CBaggagePropagator()])],
    ids=["own", "of the default parts"],
)
def test_another_propagator(spans: Spans, client: metaq.Client, own: TextMapPropagator) -> None:
    """The propagator that a program has set decides about the form of the context."""
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(own)
    try:
        client.producer().send("orders", b"1")
        (message,) = received(client)
    finally:
        propagate.set_global_textmap(before)
    assert message.properties["own-trace"] == f"{ids(spans.one('send orders'))[0]:x}"
    assert "traceparent" not in message.properties


def test_a_send_that_is_not_sampled(client: metaq.Client) -> None:
    """There is no span, and the message tells its consumers so."""
    provider = TracerProvider(sampler=ALWAYS_OFF)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    MetaqInstrumentor().instrument(tracer_provider=provider)
    try:
        client.producer().send("orders", b"1")
    finally:
        MetaqInstrumentor().uninstrument()
    assert exporter.get_finished_spans() == ()
    flags = int(received(client)[0].properties["traceparent"].split("-")[3], 16)
    assert not flags & TraceFlags.SAMPLED


def test_the_other_ways_to_send(spans: Spans, client: metaq.Client) -> None:
    """Each message has the context of its own send, also those that linger and go together."""
    with client.producer(linger_ms=1000) as producer:
        futures = [producer.send_async("orders", body) for body in (b"1", b"2")]
    client.producer().send_async("orders", b"3").result(WAIT_S)
    client.producer().send_oneway("orders", b"4")
    assert len({future.result(WAIT_S).id for future in futures}) == 2
    sends = spans.wait("send orders", 4)
    carried = {int(message.properties["traceparent"].split("-")[2], 16) for message in received(client, 4)}
    assert carried == set(ids(*sends))
    assert {span.kind for span in sends} == {SpanKind.PRODUCER}
    assert [names.PARTITION_ID in attributes(span) for span in sends] == [True, True, True, False]
    assert len({attributes(span)[names.MESSAGE_ID] for span in sends}) == 4
    assert {attributes(span)[names.CLIENT_ID] for span in sends} == {client.id}


def test_a_send_that_fails(spans: Spans, client: metaq.Client) -> None:
    """The error's class, and the error itself as an event."""
    with pytest.raises(metaq.BadRequest):
        client.producer().send_batch("orders", [b"1", b"2", b"3" * (5 * 1024 * 1024)])
    span = spans.one("send orders")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "metaq.errors.BadRequest"
    assert [event.name for event in span.events] == ["exception"]


def test_a_context_that_the_program_gives(spans: Spans, client: metaq.Client) -> None:
    """It stays in the message; the send links to it, and is no creation context itself."""
    client.producer().send("orders", b"1", properties={"traceparent": GIVEN})
    span = spans.one("send orders")
    assert received(client)[0].properties["traceparent"] == GIVEN
    assert [f"{span_id:016x}" for span_id in linked(span)] == [GIVEN.split("-")[2]]
    assert span.kind is SpanKind.CLIENT


def test_a_batch(spans: Spans, client: metaq.Client) -> None:
    """A span for the creation of each message, to which that of the send links."""
    batch: list[bytes | metaq.OutgoingMessage] = [
        b"1",
        metaq.OutgoingMessage(b"2", tag="paid"),
        metaq.OutgoingMessage(b"3", properties={"traceparent": GIVEN}),
    ]
    client.producer().send_batch("orders", batch)
    span, creates = spans.one("send orders"), spans.wait("create orders", 2)
    given = int(GIVEN.split("-")[2], 16)
    assert linked(span) == [*ids(*creates), given]
    assert (span.kind, creates[0].kind) == (SpanKind.CLIENT, SpanKind.PRODUCER)
    assert attributes(span)["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes(span)
    carried = [int(message.properties["traceparent"].split("-")[2], 16) for message in received(client, 3)]
    assert carried == linked(span)


def test_a_batch_of_one(spans: Spans, client: metaq.Client) -> None:
    """It is a batch: its message gets its id later."""
    assert len(client.producer().send_batch("orders", [b"1"])) == 1
    span, created = spans.one("send orders"), spans.one("create orders")
    assert linked(span) == ids(created) == [int(received(client)[0].properties["traceparent"].split("-")[2], 16)]
    with pytest.raises(metaq.BadRequest):
        client.producer().send_batch("orders", [b"1", 5])  # type: ignore[list-item]


def test_a_batch_without_create_spans(client: metaq.Client) -> None:
    """The messages carry the context of the send."""
    spans = Spans()
    MetaqInstrumentor().instrument(tracer_provider=spans.provider, create_spans=False)
    try:
        client.producer().send_batch("orders", [b"1", b"2"])
    finally:
        MetaqInstrumentor().uninstrument()
    span = spans.one("send orders")
    assert span.kind is SpanKind.PRODUCER
    assert spans.named("create orders") == []
    carried = {int(message.properties["traceparent"].split("-")[2], 16) for message in received(client, 2)}
    assert carried == set(ids(span))


def test_a_transaction(spans: Spans, client: metaq.Client) -> None:
    """The send of the half message, and the outcome, which settles it."""
    outcomes = (metaq.Outcome.COMMIT, metaq.Outcome.ROLLBACK)
    execute = lambda message, outcome: outcome  # noqa: E731
    with client.transaction_producer("tellers", execute, check=lambda message: metaq.Outcome.UNKNOWN) as producer:
        for outcome in outcomes:
            producer.send("orders", b"1", argument=outcome)
    sends = spans.wait("send orders", 2)
    settled = [spans.one("commit orders"), spans.one("rollback orders")]
    assert [parent(span) for span in settled] == ids(*sends)
    assert [attributes(span)["messaging.operation.type"] for span in settled] == ["settle", "settle"]
    assert "messaging.consumer.group.name" not in attributes(settled[0])


def test_a_listener_continues_the_trace(spans: Spans, memory: InMemoryBroker, client: metaq.Client) -> None:
    """Its span is a child of the send, at each attempt; within it are the baggage and what the listener sends."""
    tenants: list[object] = []

    def listener(message: metaq.ReceivedMessage) -> None:
        tenants.append(baggage.get_baggage("tenant"))
        client.producer().send("bills", b"bill")
        if not message.reconsume_times:
            raise ValueError("not yet")

    token = context.attach(baggage.set_baggage("tenant", "acme"))
    sent = client.producer().send("orders", b"1", keys="2003")
    context.detach(token)
    with client.listen("orders", "billing", listener, consume_from=FIRST):
        spans.one("retry orders")
        memory.advance(10)
        spans.wait("process orders", 2)
    send = spans.one("send orders")
    failed, succeeded = spans.wait("process orders", 2)
    assert [parent(failed), parent(succeeded), parent(spans.one("retry orders"))] == ids(send) * 3
    assert linked(failed) == ids(send)
    assert [parent(span) for span in spans.wait("send bills", 2)] == ids(failed, succeeded)
    assert failed.kind is SpanKind.CONSUMER
    assert attributes(failed)["error.type"] == "ValueError"
    assert attributes(succeeded) == {
        "messaging.system": "metaq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": attributes(succeeded)["messaging.destination.partition.id"],
        "messaging.consumer.group.name": "billing",
        "messaging.client.id": client.id,
        "messaging.message.id": sent.id,
        "messaging.metaq.message.keys": "2003",
        "messaging.metaq.message.reconsume_times": 1,
    }
    assert tenants == ["acme", "acme"]
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_listener_of_batches(spans: Spans, client: metaq.Client) -> None:
    """It links to all messages, and begins a trace of its own."""
    with client.producer() as producer:
        for body in (b"1", b"2"):
            producer.send("orders", body)
    with client.listen("orders", "billing", lambda messages: None, batch_size=2, consume_from=FIRST):
        span = spans.one("process orders")
    assert linked(span) == ids(*spans.wait("send orders", 2))
    assert span.parent is None
    assert attributes(span)["messaging.batch.message_count"] == 2


def test_leased_messages(spans: Spans, client: metaq.Client) -> None:
    """What is received links to its send; a handler's span is a child of it, and the ack a child of the handler's."""
    with client.lease_consumer("orders", "billing", from_first=True) as consumer:
        for body in (b"ack", b"reject"):
            client.producer().send("orders", body)
            message = consumer.receive(WAIT_S)
            assert message is not None
            message.ack() if body == b"ack" else message.reject()

        def handler(message: metaq.LeasedMessage) -> None:
            threading.Thread(target=consumer.close).start()

        client.producer().send("orders", b"handled")
        consumer.run(handler, concurrency=1)
    sends = spans.wait("send orders", 3)
    receives = spans.wait("receive orders", 2)
    acks = spans.wait("ack orders", 2)
    handled = spans.one("process orders")
    assert [linked(span) for span in receives] == [ids(send) for send in sends[:2]]
    assert [span.parent for span in receives] == [None, None]
    assert [parent(span) for span in (acks[0], spans.one("reject orders"), handled, acks[1])] == ids(*sends, handled)
    assert (acks[0].kind, receives[0].kind) == (SpanKind.CLIENT, SpanKind.CLIENT)
    assert attributes(acks[0])["messaging.operation.name"] == "ack"
    assert attributes(acks[0])["messaging.consumer.group.name"] == "billing"


def test_a_program_that_says_where_it_processes(spans: Spans, client: metaq.Client) -> None:
    """One message continues its trace, several are linked; within another span none is the parent."""
    for body in (b"1", b"2"):
        client.producer().send("orders", body)
    sends = spans.wait("send orders", 2)
    messages = received(client, 2)
    with pytest.raises(KeyError), process(messages[0], group="billing"):
        client.producer().send("bills", b"bill")
        raise KeyError
    with process(*messages):
        pass
    with spans.tracer.start_as_current_span("job") as job, process(messages[1]):
        pass
    single, both, nested = spans.wait("process orders", 3)
    assert parent(single) == ids(*sends)[0]
    assert parent(spans.one("send bills")) == ids(single)[0]
    assert single.status.status_code is StatusCode.ERROR
    assert attributes(single)["messaging.consumer.group.name"] == "billing"
    assert (linked(both), both.parent) == (ids(*sends), None)
    assert (linked(nested), parent(nested)) == (ids(sends[1]), job.get_span_context().span_id)


def test_asyncio(spans: Spans, memory: InMemoryBroker) -> None:
    """A trace leads through tasks: from the sender's, to a listener, to a handler of leased messages."""
    consumers: list[metaq.aio.LeaseConsumer] = []

    async def work() -> None:
        async with metaq.aio.connect(memory.address) as client:
            producer = client.producer()

            async def listener(message: metaq.ReceivedMessage) -> None:
                await producer.send("bills", b"bill")

            async def handler(message: metaq.aio.LeasedMessage) -> None:
                await producer.send_batch("mails", [b"mail", b"copy"])
                await consumers[0].close()

            with spans.tracer.start_as_current_span("request"):
                await producer.send("orders", b"1")
            consumers.append(await client.lease_consumer("bills", "mailing", from_first=True))
            async with await client.listen("orders", "billing", listener, consume_from=FIRST):
                await consumers[0].run(handler, concurrency=1)
            async with await client.consumer("bills", "archive", consume_from=FIRST) as archive:
                message = await archive.receive(WAIT_S)
                assert message is not None
                with process(message, group="archive"):
                    await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(work(), 2 * WAIT_S))
    path = [spans.one(name) for name in ("request", "send orders", "process orders", "send bills")]
    mailing, archive = spans.wait("process bills", 2)
    assert [parent(span) for span in (*path[1:], mailing, archive)] == ids(*path, path[-1])
    assert parent(spans.one("send mails")) == ids(mailing)[0]
    assert linked(spans.one("receive bills")) == ids(path[-1])
    assert {context_of(span).trace_id for span in (*path, mailing, archive)} == {context_of(path[0]).trace_id}


@pytest.mark.parametrize("partition", [1, 2])
def test_the_partition_of_a_send_is_that_of_its_result(spans: Spans, partition: int) -> None:
    """It is named while the answer is awaited, and once more if a broker has taken another one."""
    tracing = Tracing(spans.tracer, create_spans=False)
    ended = tracing.sending("c", "g", "orders", [{"UNIQ_KEY": "id"}])
    tracing.written(ended, metaq.MessageQueue("orders", "a", 1))
    queue = metaq.MessageQueue("orders", "a", partition)
    ended([metaq.SendResult("id", "offset id", queue, QueueOffset(0), metaq.SendStatus.SEND_OK)])
    assert attributes(spans.one("send orders"))["messaging.destination.partition.id"] == f"a-{partition}"


def test_nothing_without_instrumentation(spans: Spans, client: metaq.Client) -> None:
    """Suppressed, or ended: no span, and messages carry nothing."""
    with suppress_instrumentation():
        client.producer().send("orders", b"1")
        client.producer().send_batch("orders", [b"2", b"3"])
        with client.lease_consumer("orders", "billing", from_first=True) as consumer:
            message = consumer.receive(WAIT_S)
            assert message is not None
            with process(message):
                message.ack()
    MetaqInstrumentor().uninstrument()
    client.producer().send("orders", b"4")
    messages = received(client, 4)
    with process(*messages):
        pass
    assert spans.exporter.get_finished_spans() == ()
    assert not [message for message in messages if "traceparent" in message.properties]
