"""A broker for tests: in the same process, in memory, without a port or a thread pool, and with a clock that tests move.

::

    import metaq
    import metaq.testing

    def test_orders_are_billed() -> None:
        with metaq.testing.broker() as broker, metaq.connect(broker.address) as client:
            client.producer().send("orders", b"paid 2003")
            ...

Clients of it are the same as of any broker. What it does: sending (one, batch, one-way, reply), pulling with tags and SQL92,
groups and rebalancing, ordered consumption, delays, retries and dead letters, queries by key and id, creating and deleting
topics, and transactional messages, about which ``check_transactions`` asks their producers. What it does not do: answer bulk
fetches, keep anything, enforce limits, be slow.
"""

from metaq.testing.broker import InMemoryBroker, broker

__all__ = ["InMemoryBroker", "broker"]
