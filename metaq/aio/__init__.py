"""The client for asyncio: the same names as in ``metaq``, to be awaited.

::

    async with metaq.aio.connect("127.0.0.1:9876") as client:
        await client.producer().send("orders", b"paid 2003")
        async with await client.consumer("orders", "billing") as consumer:
            async for message in consumer:
                ...
                await consumer.commit()

Underneath works the client of ``metaq`` with its threads; what would block is done by them, never by the event loop. A call
that is cancelled is not undone: a message may be sent, an offset committed. Waiting for messages can be cancelled without loss:
the message comes to whoever asks next.
"""

from metaq.aio.admin import Admin
from metaq.aio.client import Client, Producer, PullConsumer, PushConsumer, SimpleConsumer, TransactionProducer, connect
from metaq.aio.xa import XaSession

__all__ = [
    "Admin",
    "Client",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "SimpleConsumer",
    "TransactionProducer",
    "XaSession",
    "connect",
]
