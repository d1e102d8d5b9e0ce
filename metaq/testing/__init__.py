"""An in-memory broker for tests: in the same process, without a port, and with a clock that tests move.

::

    import metaq
    import metaq.testing

    def test_orders_are_billed() -> None:
        with metaq.testing.broker() as broker, metaq.connect(broker.address) as client:
            client.producer().send("orders", b"paid 2003")
            ...

Its clients are the same as those of any broker. It supports sending (one, batch, one-way, reply), pulling with tags and SQL92,
groups and rebalancing, ordered consumption, leases, delays and cancels, retries and dead letters, queries by key and id,
creating and deleting topics, and transactional messages, whose producers ``check_transactions`` asks. It has no thread pool,
keeps nothing on disk, enforces no limits, simulates no latency, and does not answer bulk fetches.
"""

from metaq.testing.broker import InMemoryBroker, broker

__all__ = ["InMemoryBroker", "broker"]
