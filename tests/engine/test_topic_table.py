"""The topic table: what a start finds in the store."""

from pathlib import Path

import pytest

from metaq.engine.tables.topics import Topic, TopicTable
from metaq.errors import Overloaded
from metaq.message import OFFSETS_TOPIC, TopicPartition
from metaq.store.files.disk import RealDisk
from metaq.store.files.filecache import run_here


def test_what_is_in_the_store_is_found_whatever_the_limit(tmp_path: Path) -> None:
    """MQ-090: a table that is lost, or a limit that was lowered, stops no start; new topics are limited all the same."""
    table = TopicTable(tmp_path, max_topics=1)
    known = {TopicPartition("a", 0): 7, TopicPartition("b", 2): 5, TopicPartition(OFFSETS_TOPIC, 0): 1}
    assert table.load(RealDisk(), known) == []
    table.add_system_topics("cluster", "broker", auto_create=True)
    assert [(topic.name, topic.partitions) for topic in table.of_users()] == [("a", 1), ("b", 3)]
    with pytest.raises(Overloaded, match="max_topics"):
        table.ensure("c", 1)


def test_a_deleted_topic_is_not_made_again_for_messages_that_were_parked(tmp_path: Path) -> None:
    """SG-075, ES-008: nor after a restart; also one of which the store has no partition, as no message is there yet."""
    table, disk = TopicTable(tmp_path, max_topics=9), RealDisk()
    table.ensure("gone", 2)
    table.delete("gone", {})
    assert table.of_parked("gone", 1) is None
    table.save(disk, 0, run_here)
    empty = {TopicPartition("gone", 0): 0}
    for known in ({}, empty):
        table = TopicTable(tmp_path, max_topics=9)
        assert table.load(disk, known) == []
        assert table.of_parked("gone", 1) is None and not table.unsaved
    table.reload(disk, empty)
    assert table.of_parked("gone", 1) is None
    table = TopicTable(tmp_path, max_topics=9)
    assert table.load(disk, {TopicPartition("gone", 0): 1}) == []
    assert table.of_parked("gone", 0) == Topic("gone", 1, 1)  # it was made again, and has a message


def test_the_topic_of_a_message_that_was_parked_is_made_again_whatever_the_limit(tmp_path: Path) -> None:
    """T-1, MQ-090: other topics took the room after a kill had forgotten it; no delivery may stop because of it."""
    table = TopicTable(tmp_path, max_topics=1)
    table.ensure("other", 1)
    assert table.of_parked("forgotten", 2) == Topic("forgotten", 3, 3)
    with pytest.raises(Overloaded, match="max_topics"):
        table.ensure("new", 1)


def test_a_slave_keeps_the_ends_of_deleted_topics_that_it_has_not_all_of(tmp_path: Path) -> None:
    """SG-064, SG-083: the rest of their messages is still to come; a master whose log has lost them takes the ends back."""
    key, disk = TopicPartition("gone", 0), RealDisk()
    ours, theirs = TopicTable(tmp_path, 10), TopicTable(tmp_path, 10)
    ours.ensure("gone", 1)
    ours.delete("gone", {key: 1000})
    ours.written(disk, 0)()
    theirs.reload(disk, {key: 300})
    assert (theirs.deleted, theirs.get("gone")) == ({key: 1000}, None)
    assert theirs.has_only_deleted(key, 1000) and not theirs.has_only_deleted(key, 1001)
    assert not theirs.unsaved
    theirs.forget_lost({key: 300})
    assert theirs.deleted == {key: 300}
    assert theirs.unsaved
