"""Spans that are made while an answer is awaited: they are what the SDK would have made at once."""

import time
from typing import Any, Final

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Tracer, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry_metaq import names
from opentelemetry_metaq.late import ChosenSpan, sdk_tracer
from opentelemetry_metaq.tracing import Tracing

import metaq
from metaq.message import QueueOffset

QUEUE: Final = metaq.MessageQueue("orders", "a", 1)
RESULT: Final = metaq.SendResult("id", "offset id", QUEUE, QueueOffset(0), metaq.SendStatus.SEND_OK)
GIVEN: Final[dict[str, str | int]] = {"a": "b", "count": 3}
ROOT: Final = Context()


class Fixed(IdGenerator):
    """Gives each span the same ids, which are not random."""

    def generate_trace_id(self) -> int:
        return 7

    def generate_span_id(self) -> int:
        return 8


class FixedRandom(Fixed):
    """Gives the same ids, and says that they are random."""

    def is_trace_id_random(self) -> bool:
        return True


class Deciding(Sampler):
    """Decides always the same, adds an attribute and a trace state, and writes down the attributes that it is given."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.given: list[dict[str, Any]] = []

    def should_sample(self, parent_context: Any, trace_id: int, name: str, *more: Any) -> SamplingResult:
        _, attributes, _ = more
        self.given.append(dict(attributes))
        return SamplingResult(self.decision, {**attributes, "added": name}, TraceState([("vendor", "1")]))

    def get_description(self) -> str:
        return str(self.decision)


def tracer_of(provider: TracerProvider) -> Tracer:
    found = sdk_tracer(provider.get_tracer("tests"))
    assert found is not None
    return found


def below(*, is_remote: bool, flags: int) -> Context:
    """Return a context with a current span."""
    return trace.set_span_in_context(NonRecordingSpan(SpanContext(5, 6, is_remote, TraceFlags(flags))), ROOT)


PARENTS: Final = [ROOT, *(below(is_remote=remote, flags=flags) for remote in (False, True) for flags in range(4))]
SAMPLERS: Final = [DEFAULT_ON, ALWAYS_OFF, Deciding(Decision.RECORD_ONLY), Deciding(Decision.RECORD_AND_SAMPLE)]


@pytest.mark.parametrize("generator", [Fixed(), FixedRandom()], ids=["fixed", "random"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=Sampler.get_description)
@pytest.mark.parametrize("parent", PARENTS, ids=range(len(PARENTS)))
def test_a_late_span_is_that_of_the_sdk(generator: IdGenerator, sampler: Sampler, parent: Context) -> None:
    """It is the same in all, whatever the parent, the sampler and the ids say; its context is known before."""
    provider = TracerProvider(sampler=sampler, id_generator=generator)
    tracer = tracer_of(provider)
    chosen = ChosenSpan(tracer, "send", parent, GIVEN)
    made, expected = chosen.make(), tracer.start_span("send", parent, SpanKind.PRODUCER, GIVEN)
    assert chosen.context == made.get_span_context() == expected.get_span_context()
    assert chosen.is_recording == made.is_recording() == expected.is_recording()
    assert type(made) is type(expected)
    if isinstance(made, ReadableSpan) and isinstance(expected, ReadableSpan):
        kept = ("name", "kind", "parent", "attributes", "resource", "instrumentation_scope")
        assert [getattr(made, name) for name in kept] == [getattr(expected, name) for name in kept]


def test_after_a_fork() -> None:
    """The span has the resource that the SDK has given to its tracer meanwhile."""
    provider = TracerProvider()
    tracer = tracer_of(provider)
    chosen = ChosenSpan(tracer, "send", ROOT, GIVEN)
    provider._handle_fork()  # what the SDK has called in the child
    made = chosen.make()
    assert isinstance(made, ReadableSpan)
    assert made.resource is provider.resource


class Collecting(SimpleSpanProcessor):
    """Keeps the spans that have ended, and the names of those that have begun."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.begun: list[str] = []
        super().__init__(self.exporter)

    def on_start(self, span: ReadableSpan, parent_context: Context | None = None) -> None:
        self.begun.append(span.name)


class Collected:
    """A tracing with a sampler, and what becomes of its spans."""

    def __init__(self) -> None:
        self.processor = Collecting()
        self.sampler = Deciding(Decision.RECORD_AND_SAMPLE)
        provider = TracerProvider(sampler=self.sampler)
        provider.add_span_processor(self.processor)
        self.tracing = Tracing(provider.get_tracer("tests"), create_spans=True)

    def span(self) -> ReadableSpan:
        (span,) = self.processor.exporter.get_finished_spans()
        return span


def test_a_send() -> None:
    """The sampler is asked once, before the message goes, with all that is known; the span tells when the send began."""
    collected = Collected()
    message = {"UNIQ_KEY": "id", "TAGS": "paid"}
    start_ns = time.time_ns()
    sent = collected.tracing.sending("c", "g", "orders", [message])
    (given,) = collected.sampler.given
    assert {names.SYSTEM, names.OPERATION_NAME, names.OPERATION_TYPE, names.DESTINATION_NAME, names.MESSAGE_TAG} <= set(given)
    assert "traceparent" in message
    assert collected.processor.begun == []
    before_ns = time.time_ns()
    collected.tracing.written(sent, QUEUE)
    assert collected.processor.begun == ["send orders"]
    sent([RESULT])
    span = collected.span()
    assert span.start_time is not None
    assert start_ns <= span.start_time <= before_ns
    assert dict(span.attributes or {}) == {**given, "added": "send orders", names.PARTITION_ID: "a-1"}
    assert len(collected.sampler.given) == 1


def test_a_send_that_is_not_written() -> None:
    """It has a span all the same, which says of which message it is."""
    collected = Collected()
    collected.tracing.sending("c", "g", "orders", [{"UNIQ_KEY": "id"}])(metaq.ClientError("no route"))
    found = dict(collected.span().attributes or {})
    assert (found[names.MESSAGE_ID], found[names.ERROR_TYPE]) == ("id", "metaq.errors.ClientError")
    assert names.PARTITION_ID not in found


def test_other_tracers_make_spans_at_once() -> None:
    """Only the SDK's own tracer is known well enough."""
    assert sdk_tracer(trace.NoOpTracerProvider().get_tracer("tests")) is None
