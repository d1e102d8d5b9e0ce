"""The client for asyncio: the same names as in ``metaq``, to be awaited.

::

    async with metaq.aio.connect("127.0.0.1:9876") as client:
        await client.producer().send("orders", b"paid 2003")
        async with await client.consumer("orders", "billing") as consumer:
            async for message in consumer:
                ...
                await consumer.commit()

It is built on the blocking client of ``metaq``: calls that would block run on threads, never on the event loop. Cancelling a
call does not undo it: the message may be sent, the offset committed. Waiting for messages can be cancelled without loss: the
next call receives the message.
"""

from metaq.aio.admin import Admin
from metaq.aio.client import Client, Producer, PullConsumer, PushConsumer, SimpleConsumer, TransactionProducer, connect
from metaq.aio.leases import LeaseConsumer, LeasedMessage
from metaq.aio.xa import XaSession

__all__ = [
    "Admin",
    "Client",
    "LeaseConsumer",
    "LeasedMessage",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "SimpleConsumer",
    "TransactionProducer",
    "XaSession",
    "connect",
]
