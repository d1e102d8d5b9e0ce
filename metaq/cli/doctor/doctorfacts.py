"""The state of registries and brokers as a client sees it, from where it runs."""

import time
from collections.abc import Mapping
from typing import NamedTuple

from metaq.cli.common import connect_registry
from metaq.cli.doctor.groupfacts import collect, leases_of, watch
from metaq.client import Admin
from metaq.client.admin.views import BrokerIdentity, BrokerView, TopicView
from metaq.diagnosis.groupfacts import GroupFacts
from metaq.errors import ClientError, Refused, RouteNotFound
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import MASTER, Response


class RegistryState(NamedTuple):
    """The state of one registry."""

    address: str
    error: str | None = None
    """Why it cannot be asked, in the words of the operating system, or in its own."""
    brokers: tuple[BrokerView, ...] = ()
    refuses: bool = False
    """True when it answers, and refuses."""


class BrokerState(NamedTuple):
    """The state of one broker process, asked at the address that it advertises to clients."""

    broker: BrokerView
    error: str | None = None
    identity: BrokerIdentity | None = None
    """``None`` when it does not know the request, and so is not metaq."""
    info: Mapping[str, str] = {}
    config: Mapping[str, str] = {}
    ahead_ms: int | None = None
    """How far its clock is ahead of the one here; ``None`` when it does not report the time."""
    refuses: bool = False
    """True when it answers, and refuses."""


class TopicLook(NamedTuple):
    """The state of one topic that was asked about."""

    topic: str
    error: str | None = None
    views: tuple[TopicView, ...] = ()
    queues: tuple[MessageQueue, ...] = ()
    """Those that can be read."""


class DoctorFacts(NamedTuple):
    """All facts together."""

    registries: tuple[RegistryState, ...]
    brokers: tuple[BrokerState, ...] = ()
    topics: tuple[TopicView, ...] = ()
    """The settings that masters have for the topics of users."""
    registered: tuple[str, ...] = ()
    """All topics that the registry knows."""
    looks: tuple[TopicLook, ...] = ()
    groups: tuple[GroupFacts, ...] = ()
    gathering: str | None = None
    """Why topics and groups could not be asked about."""
    unnamed: str | None = None
    """Why no registry is known."""


def gather_facts(registry: str, topics: tuple[str, ...], groups: tuple[str, ...], watch_s: float) -> DoctorFacts:
    """Ask for all facts. Without ``groups``, every group that has members or leases now is looked at."""
    with connect_registry(registry) as client:
        admin = client.admin()
        unnamed = why_unnamed(admin)
        states = tuple(registry_state(address) for address in admin.registries)
        brokers = tuple(sorted({broker for state in states for broker in state.brokers}))
        facts = DoctorFacts(states, unnamed=unnamed)
        if not brokers:
            return facts
        facts = facts._replace(brokers=tuple(broker_state(admin, broker) for broker in brokers))
        if any(state.error for state in facts.brokers if state.broker.broker_id == MASTER):
            return facts._replace(gathering="not every master can be asked")
        try:
            return look_further(admin, facts, topics, groups, watch_s)
        except ClientError as error:
            return facts._replace(gathering=str(error))


def why_unnamed(admin: Admin) -> str | None:
    """Wait until ZooKeeper has named the registries, where it is asked for them. Return why it has not; else ``None``."""
    if admin.registries:
        return None
    try:
        admin.brokers()
    except RouteNotFound as error:
        return None if admin.registries else str(error)
    return None


def registry_state(address: str) -> RegistryState:
    """Ask one registry, without falling back to another one."""
    with connect_registry(address) as client:
        admin = client.admin()
        try:
            identity_of(admin, address)
            return RegistryState(address, None, tuple(admin.brokers()))
        except Refused as error:
            return RegistryState(address, error.text, refuses=True)
        except ClientError as error:
            return RegistryState(address, str(error))


def broker_state(admin: Admin, broker: BrokerView) -> BrokerState:
    """Ask one broker process."""
    try:
        identity = identity_of(admin, broker.address)
        before_ms = time.time_ns() // 1_000_000
        info = admin.broker_info(broker.address)
        after_ms = time.time_ns() // 1_000_000
        config = admin.broker_config(broker.address)
    except Refused as error:
        return BrokerState(broker, error.text, refuses=True)
    except ClientError as error:
        return BrokerState(broker, str(error))
    ahead_ms = difference(int(info["metaqNow"]), before_ms, after_ms) if "metaqNow" in info else None
    return BrokerState(broker, None, identity, info, config, ahead_ms)


def difference(there_ms: int, before_ms: int, after_ms: int) -> int:
    """Return how far a clock is ahead, at least, if it was read between two readings of the clock here.

    It is 0 while the readings allow for equal clocks, however slow the answer came.
    """
    return max(0, there_ms - after_ms) + min(0, there_ms - before_ms)


def identity_of(admin: Admin, address: str) -> BrokerIdentity | None:
    """Return the identity of the process that answers; ``None`` when it is not metaq."""
    try:
        return admin.identity(address)
    except Refused as error:
        if error.code != Response.REQUEST_CODE_NOT_SUPPORTED:
            raise
        return None


def look_further(
    admin: Admin, facts: DoctorFacts, topics: tuple[str, ...], groups: tuple[str, ...], watch_s: float
) -> DoctorFacts:
    """Add topics and groups to the facts."""
    system = set(admin.system_topics())
    names = groups or tuple(view.name for view in admin.groups() if concerns(admin, view.name))
    return facts._replace(
        topics=tuple(view for view in admin.all_topic_configs() if view.topic not in system),
        registered=tuple(admin.topics()),
        looks=tuple(topic_look(admin, topic) for topic in topics),
        groups=watch(admin, [collect(admin, name) for name in names], watch_s),
    )


def concerns(admin: Admin, group: str) -> bool:
    """Return whether a group has members now, or leases messages and is not done with all of them."""
    if admin.members(group) is not None:
        return True
    found = [leased for broker in admin.masters() for leased in leases_of(admin, broker, group, None)]
    return any(leased.topic.waiting_consumers or any(row.lag for row in leased.places) for leased in found)


def topic_look(admin: Admin, topic: str) -> TopicLook:
    """Look up one topic by its route."""
    try:
        return TopicLook(topic, None, tuple(admin.topic_config(topic)), admin.readable(topic))
    except ClientError as error:
        return TopicLook(topic, str(error))
