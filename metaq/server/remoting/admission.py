"""Admission of remoting requests: the right and the longest body of each request code.

``metaq.server.endpoint`` looks here before a handler receives a request, and so before anything in its body is read. The body
must not be longer than is useful, and the client must have the right that the code needs on at least one topic or group. Which
topic or group a request concerns is in its header or body: handlers check that right themselves
(``metaq.server.access.permissions``).

The lengths are such that the most expensive body of each code takes less than 20 ms of the loop; what takes longer is parsed in
a thread.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import MAX_FRAME_BYTES, RemotingCommand
from metaq.server.access.permissions import Action, Principal, denied

NONE_BYTES: Final = 4096
"""For requests whose body is ignored: some clients may send one all the same."""
ROW_BYTES: Final = 8 * 1024
"""For one row or a few: a group, a version, the route of a topic."""
TABLE_BYTES: Final = 256 * 1024
"""For what one client reports about itself: a thousand subscriptions, or a thousand queues."""
OFFSETS_BYTES: Final = 32 * 1024
"""For an offset for each partition of a topic that has as many as a topic may have."""
SETTINGS_BYTES: Final = 64 * 1024
REGISTRATION_BYTES: Final = 4 * 1024 * 1024
"""16,000 topics."""


class Admission(NamedTuple):
    """The conditions that a request must meet before its handler receives it."""

    actions: tuple[Action, ...]
    """The actions of which the client must be allowed at least one, on some topic or group; empty for requests open to all."""
    most_bytes: int = NONE_BYTES
    """The longest body, in bytes."""

    def check_size(self, request: RemotingCommand) -> None:
        """Raise ``BadRequest`` when the body is too long."""
        size = len(request.body)
        if size > self.most_bytes:
            reason = f"a body of {size} bytes is over the limit of {self.most_bytes}"
            raise BadRequest(f"request {request.code}: {reason} for this request")

    def check_right(self, principal: Principal) -> None:
        """Raise ``AccessDenied`` when the principal may do none of these actions on anything."""
        if self.actions and not any(map(principal.may_somewhere, self.actions)):
            raise denied(principal, self.actions[0])


def _of(actions: Iterable[Action], codes: Iterable[Request], most_bytes: int = NONE_BYTES) -> dict[int, Admission]:
    return dict.fromkeys(codes, Admission(tuple(actions), most_bytes))


_MEMBER: Final = (Action.CONSUME, Action.PUBLISH, Action.INSPECT)
"""For requests of any client that sends heartbeats; every user may send these."""
_SENDER: Final = (Action.PUBLISH, Action.CONSUME)
"""Consumers send too: to their group's retry topic, and replies."""
_LOOK: Final = (Action.INSPECT,)
_CHANGE: Final = (Action.ADMINISTER,)

ADMITTED: Final[Mapping[int, Admission]] = {
    **_of((), (Request.IDENTITY,)),
    # clients
    **_of(
        _SENDER,
        (
            Request.SEND_MESSAGE,
            Request.SEND_MESSAGE_V2,
            Request.SEND_BATCH_MESSAGE,
            Request.SEND_REPLY_MESSAGE,
            Request.SEND_REPLY_MESSAGE_V2,
        ),
        MAX_FRAME_BYTES,  # the body is stored as it is; handlers check max_message_bytes
    ),
    **_of((Action.PUBLISH,), (Request.END_TRANSACTION, Request.RECALL_MESSAGE)),
    **_of(
        (Action.SUBSCRIBE,),
        (
            Request.BULK_FETCH,
            Request.QUERY_MESSAGE,
            Request.VIEW_MESSAGE_BY_ID,
            Request.SEARCH_OFFSET_BY_TIMESTAMP,
            Request.GET_MAX_OFFSET,
            Request.GET_MIN_OFFSET,
            Request.GET_EARLIEST_MSG_STORETIME,
        ),
    ),
    **_of((Action.SUBSCRIBE,), (Request.CHECK_CLIENT_CONFIG,), TABLE_BYTES),
    **_of(
        (Action.CONSUME,),
        (
            Request.PULL_MESSAGE,
            Request.LITE_PULL_MESSAGE,
            Request.CONSUMER_SEND_MSG_BACK,
            Request.QUERY_CONSUMER_OFFSET,
            Request.UPDATE_CONSUMER_OFFSET,
            Request.GET_CONSUMER_LIST_BY_GROUP,
            Request.POP_MESSAGE,
            Request.ACK_MESSAGE,
            Request.CHANGE_MESSAGE_INVISIBLETIME,
            Request.PEEK_MESSAGE,
            Request.NOTIFICATION,
            Request.POLLING_INFO,
        ),
    ),
    **_of((Action.CONSUME,), (Request.BATCH_ACK_MESSAGE,), TABLE_BYTES),
    **_of((Action.CONSUME,), (Request.QUERY_ASSIGNMENT,), ROW_BYTES),
    **_of((Action.CONSUME,), (Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ), TABLE_BYTES),
    **_of(_MEMBER, (Request.HEART_BEAT,), TABLE_BYTES),
    **_of(_MEMBER, (Request.UNREGISTER_CLIENT,)),
    **_of((Action.LOCATE,), (Request.GET_ROUTEINFO_BY_TOPIC,)),
    # requests that read about topics, groups and clients
    **_of(
        _LOOK,
        (
            # what a registry knows
            Request.GET_BROKER_CLUSTER_INFO,
            Request.GET_BROKER_MEMBER_GROUP,
            Request.GET_KV_CONFIG,
            Request.GET_KVLIST_BY_NAMESPACE,
            Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
            Request.GET_TOPICS_BY_CLUSTER,
            Request.GET_SYSTEM_TOPIC_LIST_FROM_NS,
            Request.GET_UNIT_TOPIC_LIST,
            Request.GET_HAS_UNIT_SUB_TOPIC_LIST,
            Request.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
            Request.GET_NAMESRV_CONFIG,
            # topics
            Request.GET_ALL_TOPIC_CONFIG,
            Request.GET_TOPIC_CONFIG,
            Request.GET_TOPIC_STATS_INFO,
            Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
            # the broker
            Request.GET_BROKER_CONFIG,
            Request.GET_BROKER_RUNTIME_INFO,
            Request.VIEW_BROKER_STATS_DATA,
            # groups, their offsets and clients
            Request.GET_ALL_CONSUMER_OFFSET,
            Request.GET_ALL_DELAY_OFFSET,
            Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            Request.GET_SUBSCRIPTIONGROUP_CONFIG,
            Request.GET_ALL_MESSAGE_REQUEST_MODE,
            Request.GET_CONSUMER_CONNECTION_LIST,
            Request.GET_PRODUCER_CONNECTION_LIST,
            Request.GET_ALL_PRODUCER_INFO,
            Request.QUERY_TOPIC_CONSUME_BY_WHO,
            Request.QUERY_TOPICS_BY_CONSUMER,
            Request.QUERY_SUBSCRIPTION_BY_CONSUMER,
            Request.GET_CONSUME_STATS,
            Request.GET_BROKER_CONSUME_STATS,
            Request.QUERY_CONSUME_TIME_SPAN,
            Request.QUERY_CORRECTION_OFFSET,
            Request.QUERY_CONSUME_QUEUE,
            Request.GET_CONSUMER_RUNNING_INFO,
            Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
            Request.EXPORT_OFFSETS,
            # transactions and replicas
            Request.LIST_TRANSACTIONS,
            Request.GET_TRANSACTION,
            Request.REPLICA_STATUS,
            # timers
            Request.LIST_TIMERS,
            Request.TIMER_STATS,
            # leases
            Request.LIST_LEASES,
            Request.LIST_OPEN_MESSAGES,
            Request.LEASE_STATS,
        ),
    ),
    **_of((Action.INSPECT, Action.ADMINISTER), (Request.CRON,), 2 * SETTINGS_BYTES),  # each part has its right
    # requests that change them
    **_of((Action.CREATE,), (Request.UPDATE_AND_CREATE_TOPIC,)),  # if the topic exists, the handler requires ADMINISTER
    **_of(
        _CHANGE,
        (
            # what a registry knows
            Request.PUT_KV_CONFIG,
            Request.DELETE_KV_CONFIG,
            Request.UNREGISTER_BROKER,
            Request.BROKER_HEARTBEAT,
            Request.WIPE_WRITE_PERM_OF_BROKER,
            Request.ADD_WRITE_PERM_OF_BROKER,
            Request.DELETE_TOPIC_IN_NAMESRV,
            # topics and groups
            Request.DELETE_TOPIC_IN_BROKER,
            Request.DELETE_SUBSCRIPTIONGROUP,
            Request.CLONE_GROUP_OFFSET,
            Request.CONSUME_MESSAGE_DIRECTLY,
            # the log, transactions and replicas
            Request.CLEAN_EXPIRED_CONSUMEQUEUE,
            Request.CLEAN_UNUSED_TOPIC,
            Request.DELETE_EXPIRED_COMMITLOG,
            Request.RESUME_CHECK_HALF_MESSAGE,
            Request.DECIDE_TRANSACTION,
            Request.CHANGE_ROLE,
            Request.HAND_OVER,
        ),
    ),
    **_of(
        _CHANGE,
        (
            Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            Request.SET_MESSAGE_REQUEST_MODE,
            Request.REGISTER_TOPIC_IN_NAMESRV,
            Request.QUERY_DATA_VERSION,
        ),
        ROW_BYTES,
    ),
    **_of(_CHANGE, (Request.UPDATE_BROKER_CONFIG, Request.UPDATE_NAMESRV_CONFIG), SETTINGS_BYTES),
    **_of(_CHANGE, (Request.INVOKE_BROKER_TO_RESET_OFFSET,), OFFSETS_BYTES),
    **_of(_CHANGE, (Request.REGISTER_BROKER,), REGISTRATION_BYTES),
}
"""By code. A handler cannot be registered for a code that is missing here."""


def admission(code: int) -> Admission:
    """Return the conditions of a code. Raise ``LookupError`` for a code without any, which is a programming error."""
    found = ADMITTED.get(code)
    if found is None:
        raise LookupError(f"metaq.server.remoting.admission does not say who may ask {code}, and how long its body may be")
    return found
