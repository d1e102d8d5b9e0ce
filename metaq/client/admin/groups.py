"""Administration: consumer groups, their members and their offsets."""

from collections.abc import Collection, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final

import orjson

from metaq.client import checks
from metaq.client.admin.brokers import do_all
from metaq.client.admin.topics import TopicAdmin
from metaq.client.admin.views import (
    GroupMembers,
    GroupView,
    LagView,
    MemberView,
    MemberWork,
    OffsetChange,
    group_row,
    read_group_names,
    read_groups,
    read_lags,
    read_members,
    read_object,
    read_producers,
    read_work,
)
from metaq.client.connecting.transport import RemotingRequest, successful
from metaq.client.consuming.beginning import ConsumeFrom
from metaq.client.message import unix_ms
from metaq.errors import BadRequest
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, MessageQueue
from metaq.protocol.remoting import headers
from metaq.protocol.remoting.adminbodies import decode_offsets, encode_places
from metaq.protocol.remoting.attributes import GROUP_ATTRIBUTES, check_attributes
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32
from metaq.protocol.remoting.routes import decode_topic_list

_END: Final = -1
"""The time that means the end of a queue when offsets are reset."""


class GroupAdmin(TopicAdmin):
    """The administration of groups, on top of that of topics: a group has a retry topic and a dead-letter topic."""

    def groups(self) -> list[GroupView]:
        """Return all consumer groups, each with the configuration of the first master that knows it.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        found: dict[str, GroupView] = {}
        for broker in self.masters():
            for group in self.groups_at(broker.address):
                found.setdefault(group.name, group)
        return sorted(found.values())

    def groups_at(self, address: str) -> list[GroupView]:
        """Return all consumer groups with their configuration at one broker.

        Args:
            address: the broker's address, ``host:port``.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return [view for view, _ in self._groups_at(address).values()]

    def groups_of_topic(self, topic: str) -> list[str]:
        """Return the groups that consume a topic or did so before.

        Args:
            topic: the name of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        header = headers.TopicOnly(topic)
        return sorted(set(self._on_topic(topic, Request.QUERY_TOPIC_CONSUME_BY_WHO, header, read_group_names)))

    def update_group(self, group: GroupView, *, fields: Collection[str] | None = None) -> None:
        """Create a group, or change its configuration, on all masters.

        Args:
            group: the group as it shall be.
            fields: the names of the settings of ``group`` to change; the others stay as they are on each broker. By default
                all.

        Raises:
            BadRequest: the group has a value that it cannot have, or ``fields`` has a name that is none of its settings.
            RouteNotFound: no registry answers, or none names a master; nothing was changed then.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        check_attributes(GROUP_ATTRIBUTES, group.attributes())
        if strangers := set(fields or ()) - set(GroupView._fields):
            raise BadRequest(f"a group has no setting {min(strangers)}; it has {', '.join(GroupView._fields[1:])}")
        changes = {name: getattr(group, name) for name in (GroupView._fields if fields is None else fields)}
        for broker in self._chosen(()):
            before, row = self._groups_at(broker.address).get(group.name, (GroupView(group.name), {}))
            body = orjson.dumps(group_row(before._replace(**changes), before, row))
            self._ask(broker.address, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, body)

    def delete_group(self, group: str, *, with_offsets: bool = True) -> None:
        """Delete a group with its retry topic and its dead-letter topic, and by default with its offsets.

        An error of a registry is raised when all else is deleted; it may be deleted again.

        Args:
            group: the name of the group.
            with_offsets: delete its offsets, too; a group made anew begins anew then.

        Raises:
            RouteNotFound: no registry answers, or none names a master; nothing was changed then.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        header = headers.DeleteGroup(group, with_offsets, with_offsets)
        for broker in self._chosen(()):  # first, as a broker refuses it for its own groups
            self._ask(broker.address, Request.DELETE_SUBSCRIPTIONGROUP, header)
        do_all(partial(self.delete_topic, f"{prefix}{group}") for prefix in (RETRY_PREFIX, DEAD_PREFIX))

    def topics_of_group(self, group: str) -> list[str]:
        """Return the topics that a group subscribes to or has offsets of, including its retry topic.

        Args:
            group: the name of the group.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        header = headers.GroupOnly(group)
        code = Request.QUERY_TOPICS_BY_CONSUMER
        bodies = [self._ask(broker.address, code, header).body for broker in self.masters()]
        return sorted({topic for body in bodies for topic in decode_topic_list(body)})

    def members(self, group: str) -> GroupMembers | None:
        """Return the members of a group and their subscriptions; ``None`` when no member is connected.

        Args:
            group: the name of the group.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        found: GroupMembers | None = None
        for broker in self.masters():
            seen = self.members_at(broker.address, group)
            if found is not None and seen is not None:
                seen = seen._replace(members=tuple(sorted({*found.members, *seen.members})))
            found = seen or found
        return found

    def members_at(self, address: str, group: str) -> GroupMembers | None:
        """Return the members of a group that are connected to one broker; ``None`` when there are none.

        Args:
            address: the broker's address, ``host:port``.
            group: the name of the group.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        request = RemotingRequest.of(Request.GET_CONSUMER_CONNECTION_LIST, headers.ConsumerGroupOnly(group))
        response = self._core.transport.call(address, request, self._core.deadline())
        return None if response.code == Response.CONSUMER_NOT_ONLINE else read_members(successful(response).body)

    def producers(self) -> dict[str, list[MemberView]]:
        """Return the connected producers by group.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        found: dict[str, set[MemberView]] = {}
        for broker in self.masters():
            for group, members in read_producers(self._ask(broker.address, Request.GET_ALL_PRODUCER_INFO).body).items():
                found.setdefault(group, set()).update(members)
        return {group: sorted(found[group]) for group in sorted(found)}

    def member_state(self, group: str, client_id: str) -> dict[str, Any]:
        """Return the state that a member reports, with RocketMQ's names.

        Args:
            group: the name of the group.
            client_id: the member's id, as ``members`` returns it.

        Raises:
            Refused: the member is not connected.
            RouteNotFound: no registry answers.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        header = headers.RunningInfo(group, client_id)
        return self._first(lambda address: read_object(self._ask(address, Request.GET_CONSUMER_RUNNING_INFO, header).body))

    def member_work(self, group: str, client_id: str) -> MemberWork:
        """Return the known parts of the state that a member reports.

        Args:
            group: the name of the group.
            client_id: the member's id, as ``members`` returns it.

        Raises:
            Refused: the member is not connected.
            RouteNotFound: no registry answers.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        header = headers.RunningInfo(group, client_id)
        return self._first(lambda address: read_work(self._ask(address, Request.GET_CONSUMER_RUNNING_INFO, header).body))

    def group_lag(self, group: str, topic: str | None = None) -> list[LagView]:
        """Return a group's lag in each queue of a topic, or of all its topics, on all masters.

        Args:
            group: the name of the group.
            topic: the topic; by default all topics of the group.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return sorted(lag for broker in self.masters() for lag in self.lag_at(broker.address, group, topic))

    def lag_at(self, address: str, group: str, topic: str | None = None) -> list[LagView]:
        """Return a group's lag in each queue of one broker.

        Args:
            address: the broker's address, ``host:port``.
            group: the name of the group.
            topic: the topic; by default all topics of the group.

        Raises:
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return read_lags(self._ask(address, Request.GET_CONSUME_STATS, headers.GetConsumeStats(group, topic)).body)

    def offsets(self, group: str, topic: str) -> dict[MessageQueue, int]:
        """Return the offsets that a group has committed in the queues of a topic.

        Args:
            group: the name of the group.
            topic: the name of the topic.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return {view.queue: view.committed for view in self.group_lag(group, topic)}

    def reset_offset(
        self,
        group: str,
        topic: str,
        to: ConsumeFrom | datetime | int,
        *,
        partitions: Collection[int] | None = None,
        apply: bool = False,
    ) -> list[OffsetChange]:
        """Reset a group's offsets in a topic, and return the changes; without ``apply`` only return what would change.

        Args:
            group: the name of the group.
            topic: the name of the topic.
            to: the beginning, the end, the first message stored at a time or later, or an offset. An offset that a partition
                does not have becomes the nearer end of the partition.
            partitions: the numbers of the partitions to reset; by default all.
            apply: reset the offsets. Connected members continue at the new offsets at once; they may still finish messages that
                they are consuming.

        Raises:
            BadRequest: ``to`` is none of these.
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        if isinstance(to, bool) or not isinstance(to, int):
            checks.choice("to", to, ConsumeFrom, or_time=True)
        before = self.offsets(group, topic)
        deadline = self._core.deadline()
        queues = [
            queue
            for queue in self._core.routes.readable(topic, deadline)
            if partitions is None or queue.partition in partitions
        ]
        changes = [OffsetChange(queue, before.get(queue), self._target(queue, to, deadline)) for queue in sorted(queues)]
        if apply:
            if partitions is None and not isinstance(to, int):
                self._reset_topic(group, topic, to, changes)
            else:
                self._reset_queues(group, topic, changes)
        return changes

    def _groups_at(self, address: str) -> dict[str, tuple[GroupView, dict[str, Any]]]:
        return read_groups(self._ask(address, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)

    def _target(self, queue: MessageQueue, to: ConsumeFrom | datetime | int, deadline: float) -> int:
        if isinstance(to, datetime):
            return self._ends.at_time(queue, unix_ms(to), deadline)
        if isinstance(to, int):
            return min(max(to, self._ends.begin(queue, deadline)), self._ends.end(queue, deadline))
        return self._ends.begin(queue, deadline) if to is ConsumeFrom.FIRST else self._ends.end(queue, deadline)

    def _reset_topic(self, group: str, topic: str, to: ConsumeFrom | datetime, changes: list[OffsetChange]) -> None:
        """Reset all partitions of each broker with one request; this is the only form that RocketMQ 4.x brokers know."""
        edges = {ConsumeFrom.FIRST: 0, ConsumeFrom.LAST: _END}
        time_ms = unix_ms(to) if isinstance(to, datetime) else edges[to]
        for broker_name in sorted({change.queue.broker_name for change in changes}):
            header = headers.ResetOffset(topic, group, time_ms, is_force=True)
            self._reset(broker_name, header, [change for change in changes if change.queue.broker_name == broker_name])

    def _reset_queues(self, group: str, topic: str, changes: list[OffsetChange]) -> None:
        """Reset all partitions of each broker with one request, whose members are then informed once.

        RocketMQ 5.x reads only the header, with one partition, and answers what it has reset; it is asked again for the others.
        """
        left = changes
        while left:
            queue, after = left[0].queue, left[0].after
            header = headers.ResetOffset(topic, group, _END, True, Int32(queue.partition), after)
            there = [change for change in left if change.queue.broker_name == queue.broker_name]
            body = encode_places({change.queue.partition: change.after for change in there})
            reset = self._reset(queue.broker_name, header, there, body)
            left = [change for change in left[1:] if reset.get(change.queue) != change.after]

    def _reset(
        self, broker_name: str, header: headers.ResetOffset, changes: list[OffsetChange], body: bytes = b""
    ) -> Mapping[MessageQueue, int]:
        """Have a broker reset offsets and inform the members; when none is connected, commit the offsets for the group.

        Return the offsets that were set.
        """
        address = self._core.master(broker_name)
        request = RemotingRequest.of(Request.INVOKE_BROKER_TO_RESET_OFFSET, header, body)
        response = self._core.transport.call(address, request, self._core.deadline())
        if response.code != Response.CONSUMER_NOT_ONLINE:
            done = successful(response).body
            return decode_offsets(done) if done else {}
        for change in changes:
            offset = headers.UpdateConsumerOffset(header.group, header.topic, Int32(change.queue.partition), change.after)
            self._ask(address, Request.UPDATE_CONSUMER_OFFSET, offset)
        return {change.queue: change.after for change in changes}
