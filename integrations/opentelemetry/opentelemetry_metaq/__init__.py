"""Traces of messages for OpenTelemetry: an instrumentor for metaq.

::

    MetaqInstrumentor().instrument()

``opentelemetry-instrument`` does this by itself. A program that asks for messages, instead of having a listener or a handler
called, says by ``with process(message):`` where it processes one.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]  # it is not typed

import metaq
from metaq import ReceivedMessage
from opentelemetry_metaq.names import SCHEMA_URL
from opentelemetry_metaq.tracing import Tracing
from opentelemetry_metaq.version import __version__

__all__ = ["MetaqInstrumentor", "process"]

_tracing: Tracing | None = None


class MetaqInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Makes spans of what all metaq clients of this process do, from ``instrument`` to ``uninstrument``.

    ``instrument`` takes a ``tracer_provider``, by default the global one, and ``create_spans``: ``False`` to have no span for
    each message of a batch; consumers' spans then link to the span of the whole batch.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return what must be installed."""
        return ("metaq-broker >= 0.1.0",)

    def _instrument(self, **kwargs: Any) -> None:
        global _tracing  # noqa: PLW0603 - a process is instrumented once
        provider = kwargs.get("tracer_provider")
        tracer = trace.get_tracer("opentelemetry_metaq", __version__, provider, SCHEMA_URL)
        tracing = Tracing(tracer, create_spans=kwargs.get("create_spans", True))
        metaq.intercept(tracing)
        _tracing = tracing

    def _uninstrument(self, **kwargs: Any) -> None:
        global _tracing  # noqa: PLW0603
        metaq.intercept(None)
        _tracing = None


@contextmanager
def process(*messages: ReceivedMessage, group: str = "") -> Iterator[None]:
    """Make a span of the block, in which the program processes messages that it has received; current within the block.

    A listener or handler that metaq calls has such a span already. Without instrumentation this does nothing.

    Args:
        *messages: one, whose trace the span continues unless another span is current, or several, to which it links.
        group: the group of the consumer.
    """
    if _tracing is None or not messages:
        yield
        return
    ended = _tracing.processing("", group, messages)
    try:
        yield
    except BaseException as error:
        ended(error)
        raise
    ended(None)
