"""The topic table: what a start finds in the store."""

from pathlib import Path

import pytest

from metaq.engine.tables.topics import TopicTable
from metaq.errors import Overloaded
from metaq.message import OFFSETS_TOPIC, TopicPartition
from metaq.store.files.disk import RealDisk


def test_what_is_in_the_store_is_found_whatever_the_limit(tmp_path: Path) -> None:
    """MQ-090: a table that is lost, or a limit that was lowered, stops no start; new topics are limited all the same."""
    table = TopicTable(tmp_path, max_topics=1)
    known = {TopicPartition("a", 0): 7, TopicPartition("b", 2): 5, TopicPartition(OFFSETS_TOPIC, 0): 1}
    assert table.load(RealDisk(), known) == []
    table.add_system_topics("cluster", "broker", auto_create=True)
    assert [(topic.name, topic.partitions) for topic in table.of_users()] == [("a", 1), ("b", 3)]
    with pytest.raises(Overloaded, match="max_topics"):
        table.ensure("c", 1)
