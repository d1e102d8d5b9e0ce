"""The interceptor that makes a span of each operation, and carries the trace context in the properties of messages.

The span that a message comes from is its *creation context*: that of its send, or in a batch that of its own ``create`` span.
All spans of its consumers link to it. A ``process`` or ``settle`` span of one message is also its child, unless another span is
current.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Final

from opentelemetry import baggage, context, propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.instrumentation.utils import is_instrumentation_enabled
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from metaq import Interceptor, ReceivedMessage, SendResult
from metaq.client.intercepting import Ended, Sent, SettledMessage
from metaq.client.message import CORRELATION_ID
from metaq.message import MessageQueue
from metaq.protocol.properties import KEYS, TRACE_PARENT, UNIQUE_KEY
from metaq.protocol.record import TAGS
from opentelemetry_metaq import names
from opentelemetry_metaq.late import ChosenSpan, sdk_tracer

SYSTEM: Final = "metaq"
_EMPTY: Final = Context()
_KNOWN: Final = 1024
"""The topics whose names and attributes are remembered."""
_TRACE_STATE: Final = "tracestate"
_W3C: Final = [TraceContextTextMapPropagator, W3CBaggagePropagator]

Attributes = dict[str, str | int]


class Tracing(Interceptor):
    """The spans of all clients of this process."""

    def __init__(self, tracer: Tracer, *, create_spans: bool) -> None:
        """Make spans with a tracer; ``create_spans`` says whether each message of a batch gets one of its own."""
        self._tracer = tracer
        self._sdk_tracer = sdk_tracer(tracer)
        self._create_spans = create_spans
        self._w3c: TextMapPropagator | None = None
        """The propagator that was last found to write W3C trace context and baggage."""

    # -- what the client tells ----------------------------------------------------------------------------------------

    def sending(self, client: str, group: str, topic: str, messages: Sequence[MutableMapping[str, str]]) -> Sent:
        """Begin the span of a send, and put a creation context into each message that has none."""
        current = context.get_current()
        if current and not is_instrumentation_enabled():  # an empty context says nothing
            return _nothing
        if len(messages) > 1 or UNIQUE_KEY not in messages[0]:  # those of a batch get their ids later
            return self._sending_batch(client, topic, messages)
        message = messages[0]
        name, shared = _of_sends(client, topic)
        # the id is known at once, and costs a third here of what it costs later
        attributes = {**shared, names.MESSAGE_ID: message[UNIQUE_KEY]}
        given = None
        if len(message) > 1:  # besides the id
            _describe(attributes, message)
            given = _creation(message)
        if given is not None:
            span = self._tracer.start_span(name, current, SpanKind.CLIENT, attributes, [Link(given)])
        elif self._sdk_tracer is not None:
            chosen = ChosenSpan(self._sdk_tracer, name, current, attributes)
            self._inject(message, chosen.context, current)
            return _SendEnd(chosen.make) if chosen.is_recording else _nothing
        else:
            span = self._tracer.start_span(name, current, SpanKind.PRODUCER, attributes)
            self._inject(message, span.get_span_context(), current)
        return _SendEnd(lambda: span) if span.is_recording() else _nothing

    def written(self, sent: Sent, queue: MessageQueue) -> None:
        """Make the span and name the partition while the answer is awaited; the result mostly names the same one."""
        if isinstance(sent, _SendEnd):
            sent.name_queue(queue)

    def _sending_batch(self, client: str, topic: str, messages: Sequence[MutableMapping[str, str]]) -> Sent:
        links = []
        without = []
        for message in messages:
            given = _creation(message)
            if given is None and self._create_spans:
                given = self._create(client, topic, message)
            if given is None:
                without.append(message)
            else:
                links.append(Link(given))
        attributes = _attributes("send", "send", client, topic)
        attributes[names.MESSAGE_COUNT] = len(messages)
        span = self._start(f"send {topic}", SpanKind.PRODUCER if without else SpanKind.CLIENT, attributes, links=links)
        current = context.get_current()
        for message in without:
            self._inject(message, span.get_span_context(), current)
        return _SendEnd(lambda: span)

    def _create(self, client: str, topic: str, message: MutableMapping[str, str]) -> SpanContext:
        attributes = _attributes("create", "create", client, topic)
        _describe(attributes, message)
        span = self._start(f"create {topic}", SpanKind.PRODUCER, attributes)
        self._inject(message, span.get_span_context(), context.get_current())
        span.end()
        return span.get_span_context()

    def received(self, client: str, group: str, messages: Sequence[ReceivedMessage]) -> None:
        """Make the span of a call that has returned messages. It has no length: the call may have waited for hours."""
        if is_instrumentation_enabled():
            attributes = _consumed("receive", "receive", client, group, messages)
            links = [Link(given) for given in _creations(messages)]
            self._start(f"receive {messages[0].topic}", SpanKind.CLIENT, attributes, links=links).end()

    def processing(self, client: str, group: str, messages: Sequence[ReceivedMessage]) -> Ended:
        """Begin the span of a listener or handler, and make it the current one, together with the baggage of its message."""
        if not is_instrumentation_enabled():
            return _nothing
        attributes = _consumed("process", "process", client, group, messages)
        parent = _parent(messages[0]) if len(messages) == 1 else context.get_current()
        links = [Link(given) for given in _creations(messages)]
        span = self._start(f"process {messages[0].topic}", SpanKind.CONSUMER, attributes, parent, links)
        token = context.attach(trace.set_span_in_context(span, parent))

        def ended(error: BaseException | None) -> None:
            context.detach(token)
            _end(span, error)

        return ended

    def settling(self, client: str, group: str, action: str, message: SettledMessage) -> Ended:
        """Begin the span of an ack, of another word about a leased message, or of the outcome of a transaction."""
        if not is_instrumentation_enabled():
            return _nothing
        attributes = _attributes(action, "settle", client, message.topic)
        attributes[names.MESSAGE_ID] = message.id
        if isinstance(message, ReceivedMessage):
            attributes[names.CONSUMER_GROUP] = group
        given = _creation(message.properties)
        links = [] if given is None else [Link(given)]
        span = self._start(f"{action} {message.topic}", SpanKind.CLIENT, attributes, _parent(message), links)
        return lambda error: _end(span, error)

    def _start(
        self,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        parent: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        return self._tracer.start_span(name, parent, kind, attributes, links)

    def _inject(self, message: MutableMapping[str, str], own: SpanContext, current: Context) -> None:
        """Put the context of a span into a message, and the program's baggage.

        Without baggage that is mostly one text. OpenTelemetry's own way to it makes a context and asks two propagators, which
        takes several times as long.
        """
        propagator = propagate.get_global_textmap()
        if propagator is not self._w3c:
            if not _is_w3c(propagator):
                propagate.inject(message, trace.set_span_in_context(NonRecordingSpan(own)))
                return
            self._w3c = propagator
        if current and baggage.get_all(current):
            propagate.inject(message, trace.set_span_in_context(NonRecordingSpan(own)))
            return
        trace_id, span_id, _, flags, state, is_valid = own
        if is_valid:
            message[TRACE_PARENT] = "00-%032x-%016x-%02x" % (trace_id, span_id, flags)  # noqa: UP031 - a third of an f-string
            if state:
                message[_TRACE_STATE] = state.to_header()


# -- attributes ---------------------------------------------------------------------------------------------------------


def _attributes(name: str, kind: str, client: str, topic: str) -> Attributes:
    attributes: Attributes = {
        names.SYSTEM: SYSTEM,
        names.OPERATION_NAME: name,
        names.OPERATION_TYPE: kind,
        names.DESTINATION_NAME: topic,
    }
    if client:
        attributes[names.CLIENT_ID] = client
    return attributes


@lru_cache(_KNOWN)
def _of_sends(client: str, topic: str) -> tuple[str, Attributes]:
    """Return the name that the spans of sends to a topic have, and the attributes that all of them have; not to be changed."""
    return f"send {topic}", _attributes("send", "send", client, topic)


def _describe(attributes: Attributes, properties: Mapping[str, str]) -> None:
    """Add what the properties of one message tell."""
    for name, key in ((names.MESSAGE_TAG, TAGS), (names.MESSAGE_KEYS, KEYS), (names.CONVERSATION_ID, CORRELATION_ID)):
        if value := properties.get(key):
            attributes[name] = value


def _consumed(name: str, kind: str, client: str, group: str, messages: Sequence[ReceivedMessage]) -> Attributes:
    attributes = _attributes(name, kind, client, messages[0].topic)
    if group:
        attributes[names.CONSUMER_GROUP] = group
    if len(messages) > 1:
        attributes[names.MESSAGE_COUNT] = len(messages)
        return attributes
    message = messages[0]
    attributes[names.MESSAGE_ID] = message.id
    attributes[names.PARTITION_ID] = f"{message.queue.broker_name}-{message.partition}"
    if message.reconsume_times:
        attributes[names.RECONSUME_TIMES] = message.reconsume_times
    _describe(attributes, message.properties)
    return attributes


# -- contexts -----------------------------------------------------------------------------------------------------------


def _is_w3c(propagator: TextMapPropagator) -> bool:
    """Return whether contexts are written as W3C trace context and baggage, which is OpenTelemetry's default.

    A composite propagator does not show its parts; if they are not found here, it does its work itself, as any other one does.
    """
    is_plain = type(propagator) is CompositePropagator  # a subclass may do more than its parts
    return is_plain and [type(part) for part in getattr(propagator, "_propagators", ())] == _W3C


def _creation(properties: Mapping[str, str]) -> SpanContext | None:
    """Return the creation context that a message carries; ``None`` for one without."""
    if TRACE_PARENT not in properties and _is_w3c(propagate.get_global_textmap()):
        return None
    found = trace.get_current_span(propagate.extract(properties, _EMPTY)).get_span_context()
    return found if found.is_valid else None


def _creations(messages: Sequence[ReceivedMessage]) -> list[SpanContext]:
    """Return the creation contexts of messages, each once."""
    found = filter(None, (_creation(message.properties) for message in messages))
    return list({(given.trace_id, given.span_id): given for given in found}.values())


def _parent(message: SettledMessage) -> Context:
    """Return the context for a span of one message: the current one if it has a span, else with that of the message."""
    if trace.get_current_span().get_span_context().is_valid:
        return context.get_current()
    return propagate.extract(message.properties)


# -- ends ---------------------------------------------------------------------------------------------------------------


def _nothing(outcome: object) -> None:
    """End what has no span."""


class _SendEnd:
    """The end of the span of a send, which is made before it: at once, or when it is first needed."""

    __slots__ = ("_make", "_queue", "_span")

    def __init__(self, make: Callable[[], Span]) -> None:
        self._make = make
        self._span: Span | None = None
        self._queue: MessageQueue | None = None

    def _made(self) -> Span:
        if self._span is None:
            self._span = self._make()
        return self._span

    def name_queue(self, queue: MessageQueue) -> None:
        """Say which queue the messages go to."""
        if queue != self._queue:
            self._queue = queue
            self._made().set_attribute(names.PARTITION_ID, f"{queue.broker_name}-{queue.partition}")

    def __call__(self, outcome: Sequence[SendResult] | BaseException) -> None:
        if isinstance(outcome, BaseException):
            _end(self._made(), outcome)
            return
        if outcome:
            self.name_queue(outcome[0].queue)
        self._made().end()


def _end(span: Span, error: BaseException | None) -> None:
    if error is not None:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        span.set_attribute(names.ERROR_TYPE, name)
        span.set_status(Status(StatusCode.ERROR, f"{kind.__qualname__}: {error}"))
        span.record_exception(error)
    span.end()
