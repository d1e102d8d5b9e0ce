"""Spans of OpenTelemetry's SDK that are made after the message with their context is on its way.

To make a span takes most of the time that tracing adds to a send. A message needs no more of it than its ids, and whether it is
sampled. So the provider's own sampler and generator of ids are asked for these first, and the SDK makes the span of the answers
while the sender waits for the broker. Samplers get all attributes, and the span has the time of its begin.
"""

import copy
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, TraceFlags

if TYPE_CHECKING:  # programs may have another implementation of the API
    from opentelemetry.sdk.trace import Tracer as SdkTracer
    from opentelemetry.sdk.trace.sampling import SamplingResult


class ChosenSpan(NamedTuple):
    """What is settled of a span before it is made."""

    name: str
    parent: Context
    began_ns: int
    sampling: "SamplingResult"
    context: SpanContext

    @property
    def is_recording(self) -> bool:
        """Whether there is a span to be made."""
        return self.sampling.decision.is_recording()


class LateTracer:
    """A maker of the spans of producers in two steps. Thread-safe."""

    def __init__(self, tracer: "SdkTracer") -> None:
        """Take what a tracer samples with and has its ids from; the tracer stays as it is."""
        self._sampler = tracer.sampler
        self._ids = tracer.id_generator
        self._answers = _Answers()
        maker: Any = copy.copy(tracer)
        maker.sampler = maker.id_generator = self._answers
        self._maker: SdkTracer = maker

    def choose(self, name: str, parent: Context, attributes: Mapping[str, str | int]) -> ChosenSpan:
        """Begin a span: sample it, and choose its ids, as ``start_span`` of the SDK does."""
        began_ns = time.time_ns()
        above = trace.get_current_span(parent).get_span_context()
        if above.is_valid:
            trace_id, is_random = above.trace_id, above.trace_flags.random_trace_id
        else:
            trace_id, is_random = self._ids.generate_trace_id(), self._ids.is_trace_id_random()
        sampling = self._sampler.should_sample(parent, trace_id, name, SpanKind.PRODUCER, attributes, ())
        flags = TraceFlags.SAMPLED if sampling.decision.is_sampled() else TraceFlags.DEFAULT
        if is_random:
            flags |= TraceFlags.RANDOM_TRACE_ID
        span_id = self._ids.generate_span_id()
        own = SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(flags), trace_state=sampling.trace_state)
        return ChosenSpan(name, parent, began_ns, sampling, own)

    def make(self, chosen: ChosenSpan) -> Span:
        """Make a span that was chosen, on any thread."""
        self._answers.chosen = chosen
        return self._maker.start_span(chosen.name, chosen.parent, SpanKind.PRODUCER, start_time=chosen.began_ns)


class _Answers(threading.local):
    """What the SDK asks of a sampler and a generator of ids, for the span that a thread makes."""

    chosen: ChosenSpan

    def should_sample(self, *_: object, **__: object) -> "SamplingResult":
        return self.chosen.sampling

    def generate_trace_id(self) -> int:
        return self.chosen.context.trace_id

    def generate_span_id(self) -> int:
        return self.chosen.context.span_id

    def is_trace_id_random(self) -> bool:
        return self.chosen.context.trace_flags.random_trace_id


def late_tracer(tracer: trace.Tracer) -> LateTracer | None:
    """Return the two steps of a tracer of the SDK; ``None`` for any other one, and of an SDK without the random flag."""
    try:
        from opentelemetry.sdk.trace import Tracer  # noqa: PLC0415 - it need not be installed
    except ImportError:
        return None
    if type(tracer) is not Tracer or not hasattr(tracer.id_generator, "is_trace_id_random"):
        return None
    return LateTracer(tracer)
