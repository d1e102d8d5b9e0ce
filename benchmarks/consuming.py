"""The speed of pulls by our Python client in this process, without a load generator or a second thread beside it."""

import time
from dataclasses import dataclass

from benchmarks.figures import MeasurementError
from benchmarks.peers import REPLY_SECONDS, Server
from metaq.client import PullConsumer, connect


@dataclass(frozen=True)
class Consumed:
    """The figures of one run of the client; `mb_per_second` (10⁶) counts bodies."""

    messages: int
    seconds: float
    messages_per_second: float
    mb_per_second: float


def consume(server: Server, topic: str, body_bytes: int, seconds: float, warmup_seconds: float) -> Consumed:
    """Poll all partitions of a topic from begin to end, again and again, looking at each body."""
    with connect(f"127.0.0.1:{server.registry_port}") as client, client.pull_consumer(topic) as consumer:
        consumer.assign(consumer.partitions())
        consumer.seek_to_begin()
        _poll(consumer, body_bytes, warmup_seconds)
        begun = time.perf_counter()
        messages = _poll(consumer, body_bytes, seconds)
        taken = time.perf_counter() - begun
    return Consumed(messages, taken, messages / taken, messages * body_bytes / taken / 1e6)


def _poll(consumer: PullConsumer, body_bytes: int, seconds: float) -> int:
    ends = {queue: consumer.end_offset(queue) for queue in consumer.assignment()}
    count, until = 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        messages = consumer.poll(REPLY_SECONDS)
        if not messages:
            raise MeasurementError(f"no message within {REPLY_SECONDS} s")
        if sum(len(message.body) for message in messages) != len(messages) * body_bytes:
            raise MeasurementError(f"a message that does not have {body_bytes} bytes")
        count += len(messages)
        if all(consumer.position(queue) >= end for queue, end in ends.items()):
            consumer.seek_to_begin()
    return count
