"""Appends that readers do not see for long, since too few replicas are in sync: they take little memory, and show whole."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from metaq.store.messagestore import MANY_HIDDEN, TOGETHER_BYTES
from metaq.store.recovery.recovery import open_store
from tests.store.test_copying import SLAVE
from tests.store.test_record_groups import FIRST, SECOND, put, ready

ROOMY: Final = replace(SLAVE, segment_bytes=16 << 20, queue_file_bytes=1 << 20)
APPENDS: Final = MANY_HIDDEN + 5000


def test_a_long_backlog_takes_memory_for_each_megabyte_only(tmp_path: Path) -> None:
    """And becomes visible in the order of its appends, each of them whole."""
    store, _ = open_store(tmp_path, ROOMY)
    queues = [store.queue(*key) for key in (FIRST, SECOND)]
    ends = []
    for _ in range(APPENDS):
        for key in (FIRST, SECOND):
            store.put(*ready(store, key, bytes(500)))
        assert store.append() == []
        ends.append(store.log.end)
    assert ends[-1] > 5 * TOGETHER_BYTES
    assert len(store._unpublished) <= MANY_HIDDEN + 1 + ends[-1] // TOGETHER_BYTES
    assert all(len(changes) == 2 for _, changes in store._unpublished)
    for seen, end in enumerate(ends[: MANY_HIDDEN - 1]):
        assert store.publish(end) == queues
        assert [queue.readable for queue in queues] == [seen + 1, seen + 1]
    for number in range(MANY_HIDDEN, APPENDS, 100):
        end = ends[number]
        store.publish(end)
        assert end - TOGETHER_BYTES - 2000 < store.published_end <= end
        seen = ends.index(store.published_end) + 1
        assert [queue.readable for queue in queues] == [seen, seen]
    assert store.publish(ends[-1]) == queues
    assert [(queue.readable, queue.readable_text_end) for queue in queues] == [(APPENDS, queue.text_end) for queue in queues]
    store.close()


def test_an_append_that_is_waited_for_shows_without_the_next_one(tmp_path: Path) -> None:
    """However long the backlog before it is."""
    store, _ = open_store(tmp_path, ROOMY)
    queue = store.queue(*FIRST)
    for number in range(MANY_HIDDEN + 100):
        put(store, FIRST, b"%d" % number)
    end = store.log.end
    store.put(*ready(store, FIRST, b"the next one"))
    store.append(awaited=True)
    assert store.publish(end) == [queue]
    assert queue.readable == MANY_HIDDEN + 100
    store.close()
