"""What a slave shows its readers of the log that it copies, whatever its own limits say."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import gevent

from metaq.errors import Overloaded
from metaq.message import Durability
from metaq.replication.feeder import ReplicaIdentity
from metaq.replication.follower import Follower
from metaq.server.replicas.roles import SlaveRole
from metaq.store.copies.epochs import Epochs
from metaq.store.files.filecache import run_here
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.store.recovery.recovery import open_store
from tests.cluster.test_following import DEADLINE_S, SETTINGS, Master, table
from tests.cluster.test_reopening import slave
from tests.store.test_record_groups import FIRST as T0
from tests.store.test_record_groups import put

ON_DISK: Final = replace(SETTINGS, durability=Durability.DISK_REPLICA)


def test_all_topics_of_the_master_are_shown(tmp_path: Path) -> None:
    """SG-082: also beyond ``max_topics``, and before the table of topics comes."""
    with slave(tmp_path) as server:
        assert isinstance(server.role, SlaveRole)
        context = server.broker.engine.context
        context.topics.max_topics = 1
        server.role._published([context.store.queue(topic, 2) for topic in ("orders", "more", "orders")])
        assert [(topic.name, topic.partitions) for topic in context.topics.of_users()] == [("more", 3), ("orders", 3)]


def test_a_slave_follows_on_after_it_could_not_show_something(tmp_path: Path) -> None:
    """F-FAIL: its log is synced and reported as before, and what comes next is shown."""
    source, _ = open_store(tmp_path / "master", SETTINGS)
    store, _ = open_store(tmp_path / "slave", ON_DISK)
    master = Master(source)
    shown: list[int] = []

    def show(queues: Sequence[ConsumeQueue]) -> None:
        shown.append(queues[0].readable)
        if len(shown) == 1:
            raise Overloaded("there are already 1 topics (max_topics)", retry_after_ms=1)

    follower = Follower(
        store,
        Epochs(store),
        ReplicaIdentity("c", "b", 0, 2),
        "127.0.0.1:1",
        find_master=lambda: master.address,
        folder=tmp_path / "config",
        run=run_here,
        run_sync=run_here,
        took=lambda names: None,
        published=show,
        replaced=lambda: None,
    )

    def send(body: bytes) -> None:
        master.accept()
        put(source, T0, body)
        master.send_table(table(tmp_path, 1))  # so that only the sync is missing when the message comes
        master.send_log()

    with gevent.Timeout(DEADLINE_S):
        follower.start()
        send(b"one")
        master.wait_for_end()
        master._connection.close()
        send(b"two")
        master.wait_for_report()
    assert (shown, store.durable_end) == ([1, 2], source.log.end)
    follower.stop()
    master.close()
    store.close()
    source.close()
