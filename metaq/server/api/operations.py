"""The operations of the API: each is a method, a path, and the service that does it.

What an operation takes and answers is what its service's parameters and result are declared as: a parameter of the path has its
name, ``query`` and ``body`` are the two others. Inputs are checked by these types, and the document is made of them.
"""

import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from metaq.server.services import (
    brokers,
    deadletters,
    diagnosis,
    groups,
    leases,
    messages,
    sending,
    subscribing,
    timers,
    topics,
    tracks,
    transactions,
)
from metaq.server.services.operating import cluster, history, logs, stacks, users

ROOT: Final = "/api/v1"


class Operation(NamedTuple):
    """One operation."""

    method: str
    path: str
    """Below ``ROOT``, with the names of parameters in braces."""
    service: Callable[..., Any]
    tag: str
    is_change: bool
    """True when it changes the broker for others than its caller: then the log names who called it."""

    @property
    def id(self) -> str:
        """The name of the operation."""
        return self.service.__name__

    @property
    def summary(self) -> str:
        """Its description, in a sentence or two."""
        return " ".join((inspect.getdoc(self.service) or "").split())

    @property
    def takes(self) -> "Takes":
        """The types of what it takes and answers."""
        hints = get_type_hints(self.service, include_extras=True)
        answer = hints.pop("return")
        form = Form.ROW
        if answer is subscribing.PushStream:
            form, answer = Form.FRAMES, leases.MessageLease
        elif get_origin(answer) is not None and issubclass(get_origin(answer), Iterator):
            form, answer = Form.EVENTS, get_args(get_args(answer)[0])[0]
        query, body = hints.pop("query", None), hints.pop("body", None)
        del hints["call"]
        return Takes(hints, query, body, answer, form)


class Form(enum.Enum):
    """The forms of answers."""

    ROW = "row"
    EVENTS = "events"
    """A stream of rows, as server-sent events."""
    FRAMES = "frames"
    """Rows in frames of WebSocket, over which the client also says what it wants."""


class Takes(NamedTuple):
    """The types of an operation."""

    path: dict[str, Any]
    """Those of the parameters of the path, by name."""
    query: Any
    body: Any
    answer: Any
    """That of a row, for a stream of rows."""
    form: Form


def _read(path: str, service: Callable[..., Any], tag: str) -> Operation:
    return Operation("GET", path, service, tag, is_change=False)


def _use(path: str, service: Callable[..., Any], tag: str) -> Operation:
    """Return an operation by which programs send and consume messages: too many for the log."""
    return Operation("POST", path, service, tag, is_change=False)


def _change(method: str, path: str, service: Callable[..., Any], tag: str) -> Operation:
    return Operation(method, path, service, tag, is_change=True)


_TOPIC, _GROUP = "/topics/{topic}", "/groups/{group}"
_DEAD, _LEASES = f"{_GROUP}/dead-letters", f"{_GROUP}/leases"

OPERATIONS: Final = (
    _read("/topics", topics.list_topics, "topics"),
    _read(_TOPIC, topics.show_topic, "topics"),
    _change("PUT", _TOPIC, topics.put_topic, "topics"),
    _change("DELETE", _TOPIC, topics.delete_topic, "topics"),
    _use(f"{_TOPIC}/messages", sending.publish, "messages"),
    _use(f"{_TOPIC}/messages/many", sending.publish_many, "messages"),
    _read(f"{_TOPIC}/messages", messages.search, "messages"),
    _read(f"{_TOPIC}/partitions/{{partition}}/messages", messages.read_messages, "messages"),
    _read(f"{_TOPIC}/tail", messages.tail, "messages"),
    _read(f"{_TOPIC}/newest", messages.read_newest, "messages"),
    _read("/messages/{offset_id}", messages.show_message, "messages"),
    _read("/messages/{offset_id}/groups", tracks.track_message, "messages"),
    _read("/groups", groups.list_groups, "groups"),
    _read(_GROUP, groups.show_group, "groups"),
    _change("PUT", _GROUP, groups.put_group, "groups"),
    _change("DELETE", _GROUP, groups.delete_group, "groups"),
    _read(f"{_GROUP}/lag", groups.show_lag, "groups"),
    _read(f"{_GROUP}/lag/history", history.show_lag_history, "groups"),
    _read(f"{_GROUP}/diagnosis", diagnosis.diagnose_group, "groups"),
    _use(f"{_GROUP}/offsets", groups.commit_offsets, "groups"),
    _change("POST", f"{_GROUP}/offsets/reset", groups.reset_offsets, "groups"),
    _use(_LEASES, leases.lease, "leases"),
    _use(f"{_LEASES}/ack", leases.ack, "leases"),
    _use(f"{_LEASES}/nack", leases.nack, "leases"),
    _use(f"{_LEASES}/extend", leases.extend, "leases"),
    _read(f"{_GROUP}/subscription", subscribing.subscribe, "leases"),
    _read(_LEASES, leases.list_leases, "leases"),
    _read(f"{_LEASES}/{{topic}}/{{partition}}", leases.list_open, "leases"),
    _read("/leases", leases.list_leasing, "leases"),
    _read("/dead-letters", deadletters.list_dead_groups, "dead letters"),
    _read(_DEAD, deadletters.list_dead, "dead letters"),
    _change("POST", f"{_DEAD}/replay", deadletters.replay_dead, "dead letters"),
    _change("POST", f"{_DEAD}/discard", deadletters.discard_some, "dead letters"),
    _change("DELETE", _DEAD, deadletters.discard_dead, "dead letters"),
    _read("/timers", timers.list_timers, "timers"),
    _change("DELETE", "/timers/{handle}", timers.cancel_timer, "timers"),
    _read("/recurring", timers.list_recurring, "timers"),
    _change("PUT", "/recurring/{name}", timers.define_recurring, "timers"),
    _change("DELETE", "/recurring/{name}", timers.end_recurring, "timers"),
    _read("/transactions", transactions.list_transactions, "transactions"),
    _read("/transactions/{key}", transactions.show_transaction, "transactions"),
    _change("POST", "/transactions/{key}/decision", transactions.decide_transaction, "transactions"),
    _read("/broker", brokers.show_broker, "broker"),
    _read("/broker/live", brokers.watch_broker, "broker"),
    _read("/broker/settings", brokers.show_settings, "broker"),
    _change("PATCH", "/broker/settings", brokers.change_settings, "broker"),
    _read("/broker/connections", brokers.list_connections, "broker"),
    _read("/broker/findings", brokers.find_problems, "broker"),
    _read("/broker/replicas", brokers.show_replicas, "broker"),
    _change("POST", "/broker/replicas/handover", brokers.hand_over, "broker"),
    _read("/broker/history", history.show_history, "broker"),
    _read("/broker/logs", logs.show_logs, "broker"),
    _read("/broker/stacks", stacks.show_stacks, "broker"),
    _read("/users", users.list_users, "broker"),
    _read("/cluster", cluster.show_cluster, "cluster"),
)
