"""Attributes of topics and groups: what a change makes of them, what is refused, and that a restart keeps them."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.config import TopicSettings
from metaq.engine.tables.groups import Group, GroupTable, group_of, with_changes
from metaq.engine.tables.topics import Topic, TopicTable
from metaq.errors import BadRequest
from metaq.fields import from_values
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES, TOPIC_ATTRIBUTES, changed, read_changes, write_changes
from metaq.store.files.disk import RealDisk

LEVELS = {"message.type": "PRIORITY"}


def test_changes_as_rocketmq_makes_them() -> None:
    """MY-034: set, changed, removed; what was set before stays."""
    first = changed(TOPIC_ATTRIBUTES, {}, read_changes("+message.type=PRIORITY,+priority.max.wait.ms=5"))
    assert first == LEVELS | {"priority.max.wait.ms": "5"}
    assert changed(TOPIC_ATTRIBUTES, first, read_changes("-priority.max.wait.ms,+message.type=FIFO")) == {
        "message.type": "FIFO"
    }
    assert changed(TOPIC_ATTRIBUTES, first, {}) == first


def test_a_set_grows() -> None:
    """E-09: so that two who add at once lose nothing; until it has no room for more."""
    first = changed(TOPIC_ATTRIBUTES, {}, read_changes("+discarded=0-4 9"))
    assert changed(TOPIC_ATTRIBUTES, first, read_changes("+discarded=5 7")) == {"discarded": "0-5 7 9"}
    assert changed(TOPIC_ATTRIBUTES, first, read_changes("-discarded")) == {}
    many = {"discarded": " ".join(map(str, range(1000, 2500, 2)))}
    with pytest.raises(BadRequest, match="the limit is 3800"):
        changed(TOPIC_ATTRIBUTES, many, read_changes(f"+discarded={' '.join(map(str, range(5000, 5100, 2)))}"))


@pytest.mark.parametrize(
    "text",
    [
        "message.type=PRIORITY",
        "+message.type",
        "-message.type=x",
        "-message.type",
        "+message.type=URGENT",
        "+priority.max.wait.ms=-1",
        "+priority.max.wait.ms=1.5",
        "+priority.max.wait.ms=" + "9" * 30,
        "+cleanup.policy=COMPACTION",
        "+message.type=FIFO,+message.type=FIFO",
        "+message.type=FIFO,-message.type",
        "+a=" + "x" * 5000,
    ],
)
def test_what_no_change_is(text: str) -> None:
    with pytest.raises(BadRequest):
        changed(TOPIC_ATTRIBUTES, {}, read_changes(text))


def test_a_name_that_is_not_known_is_refused_with_the_list() -> None:
    with pytest.raises(BadRequest, match=r"priority\.factor, max_in_flight"):
        changed(GROUP_ATTRIBUTES, {}, {"+colour": "red"})


@given(st.dictionaries(st.sampled_from(sorted(TOPIC_ATTRIBUTES)), st.sampled_from(["1", "FIFO", ""]), max_size=2))
def test_changes_are_read_as_they_were_written(values: dict[str, str]) -> None:
    changes = {f"+{name}" if value else f"-{name}": value for name, value in values.items()}
    assert read_changes(write_changes(changes)) == changes


def test_the_settings_of_a_group_have_types_and_defaults() -> None:
    plain = Group("g")
    assert (plain.priority_factor, plain.max_in_flight, plain.max_open, plain.max_invisible_ms) == (
        100,
        20_000,
        10**6,
        43_200_000,
    )
    assert (plain.order, plain.lease_acks, plain.lease_aged_out) == ("none", "appended", "dead")
    row = {"groupName": "g", "attributes": {"+priority.factor": "50", "+order": "key", "+lease_acks": "safe", "+max_open": "7"}}
    group = with_changes(group_of(row), None)
    assert (group.priority_factor, group.order, group.lease_acks, group.max_open) == (50, "key", "safe", 7)
    again = with_changes(group_of({"groupName": "g", "attributes": {"-order": ""}}), group)
    assert again.row()["attributes"] == {"lease_acks": "safe", "max_open": "7", "priority.factor": "50"}
    for bad in ({"+priority.factor": "101"}, {"+order": "topic"}, {"priority.factor": "5"}, {"+max_in_flight": "0"}):
        with pytest.raises(BadRequest):
            with_changes(group_of({"groupName": "g", "attributes": bad}), group)
    wrongs: list[object] = [[], {"+order": 1}]
    for wrong in wrongs:
        with pytest.raises(BadRequest):
            group_of({"groupName": "g", "attributes": wrong})


def test_a_restart_keeps_them(tmp_path: Path) -> None:
    """MY-034: in RocketMQ's files, where a slave finds them, too."""
    disk, topics = RealDisk(), TopicTable(tmp_path, 10)
    groups = GroupTable(tmp_path, max_groups=10, auto_create=True)
    topics.put(Topic("alarms", 3, 3, attributes=LEVELS))
    groups.put(Group("g", attributes={"priority.factor": "50"}))
    for table in (topics, groups):
        table.save(disk, 1, lambda call: call())
    topics, groups = TopicTable(tmp_path, 10), GroupTable(tmp_path, max_groups=10, auto_create=True)
    assert topics.load(disk, {}) == groups.load(disk) == []
    topic, group = topics.get("alarms"), groups.get("g")
    assert topic is not None
    assert topic.has_priorities
    assert topic.priority_max_wait_ms == 60_000
    assert group is not None
    assert group.priority_factor == 50


def test_the_configuration_gives_priorities(tmp_path: Path) -> None:
    topics = TopicTable(tmp_path, 10)
    topics.configure({"alarms": from_values(TopicSettings, {"partitions": 3, "priority": True})})
    topic = topics.get("alarms")
    assert topic is not None
    assert topic.attributes == LEVELS
    topics.put(replace(topic, attributes={**topic.attributes, "priority.max.wait.ms": "7"}))
    topics.configure({"alarms": from_values(TopicSettings, {"partitions": 3})})
    assert topics.get("alarms") == replace(topic, attributes=LEVELS | {"priority.max.wait.ms": "7"})


def test_more_than_ten_levels_are_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    topics = TopicTable(tmp_path, 10)
    with caplog.at_level(logging.WARNING):
        topics.put(Topic("few", 10, 10, attributes=LEVELS))
        assert not caplog.messages
        topics.put(Topic("many", 11, 11, attributes=LEVELS))
    assert caplog.messages == ["topic has many priorities topic=many levels=11"]
