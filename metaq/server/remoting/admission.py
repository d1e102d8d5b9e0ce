"""Who may ask what at all, and how long the body may be: the table without which no handler is asked.

Before a handler sees a request, and so before anything of its body is read, ``metaq.server.front`` looks here: the body must
not be longer than is useful, and whoever asks must have the right that the code needs to anything at all. Which topic or group
it is about stands in the header or in the body: handlers ask about that (``metaq.server.access.permissions``).

The lengths are such that the worst body of each code takes less than 20 ms of the loop; what takes longer is read in a thread.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import MAX_FRAME_BYTES, RemotingCommand
from metaq.server.access.permissions import Action, Principal, denied

NONE_BYTES: Final = 4096
"""Of a body that nobody reads: some client may send one all the same."""
ROW_BYTES: Final = 8 * 1024
"""One row, or a few: a group, a version, the route of a topic."""
TABLE_BYTES: Final = 256 * 1024
"""What one client says about itself: a thousand subscriptions, or a thousand queues."""
SETTINGS_BYTES: Final = 64 * 1024
REGISTRATION_BYTES: Final = 4 * 1024 * 1024
"""16,000 topics."""


class Admission(NamedTuple):
    """What must hold for a request before its handler sees it."""

    actions: tuple[Action, ...]
    """Who may do one of these to some topic or group may ask; without any, everybody."""
    most_bytes: int = NONE_BYTES
    """Of the body."""

    def check_size(self, request: RemotingCommand) -> None:
        """``BadRequest`` when the body is too long."""
        size = len(request.body)
        if size > self.most_bytes:
            reason = f"a body of {size} bytes is longer than {self.most_bytes}"
            raise BadRequest(f"request {request.code}: {reason}, all that this request may have")

    def check_right(self, principal: Principal) -> None:
        """``AccessDenied`` when the principal may do nothing of this kind to anything."""
        if self.actions and not any(map(principal.may_somewhere, self.actions)):
            raise denied(principal, self.actions[0])


def _of(actions: Iterable[Action], codes: Iterable[Request], most_bytes: int = NONE_BYTES) -> dict[int, Admission]:
    return dict.fromkeys(codes, Admission(tuple(actions), most_bytes))


_MEMBER: Final = (Action.CONSUME, Action.PUBLISH, Action.INSPECT)
"""A client that is known by its heartbeats; every user may be one."""
_SENDER: Final = (Action.PUBLISH, Action.CONSUME)
"""Who consumes sends, too: to the group's retry topic, and replies."""
_LOOK: Final = (Action.INSPECT,)
_CHANGE: Final = (Action.ADMINISTER,)

ADMITTED: Final[Mapping[int, Admission]] = {
    **_of((), (Request.IDENTITY,)),
    # clients
    **_of(
        _SENDER,
        (
            *(Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE),
            *(Request.SEND_REPLY_MESSAGE, Request.SEND_REPLY_MESSAGE_V2),
        ),
        MAX_FRAME_BYTES,  # which is stored as it is; handlers ask for max_message_bytes
    ),
    **_of((Action.PUBLISH,), (Request.END_TRANSACTION,)),
    **_of(
        (Action.SUBSCRIBE,),
        (
            *(Request.BULK_FETCH, Request.QUERY_MESSAGE, Request.VIEW_MESSAGE_BY_ID, Request.SEARCH_OFFSET_BY_TIMESTAMP),
            *(Request.GET_MAX_OFFSET, Request.GET_MIN_OFFSET, Request.GET_EARLIEST_MSG_STORETIME),
        ),
    ),
    **_of((Action.SUBSCRIBE,), (Request.CHECK_CLIENT_CONFIG,), TABLE_BYTES),
    **_of(
        (Action.CONSUME,),
        (
            *(Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE, Request.CONSUMER_SEND_MSG_BACK),
            *(Request.QUERY_CONSUMER_OFFSET, Request.UPDATE_CONSUMER_OFFSET, Request.GET_CONSUMER_LIST_BY_GROUP),
        ),
    ),
    **_of((Action.CONSUME,), (Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ), TABLE_BYTES),
    **_of(_MEMBER, (Request.HEART_BEAT,), TABLE_BYTES),
    **_of(_MEMBER, (Request.UNREGISTER_CLIENT,)),
    **_of((Action.LOCATE,), (Request.GET_ROUTEINFO_BY_TOPIC,)),
    # who looks into topics, groups and clients
    **_of(
        _LOOK,
        (
            *(Request.GET_BROKER_CLUSTER_INFO, Request.GET_BROKER_MEMBER_GROUP, Request.GET_KV_CONFIG),
            *(Request.GET_KVLIST_BY_NAMESPACE, Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, Request.GET_TOPICS_BY_CLUSTER),
            *(Request.GET_SYSTEM_TOPIC_LIST_FROM_NS, Request.GET_UNIT_TOPIC_LIST, Request.GET_HAS_UNIT_SUB_TOPIC_LIST),
            *(Request.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, Request.GET_NAMESRV_CONFIG, Request.GET_ALL_TOPIC_CONFIG),
            *(Request.GET_TOPIC_CONFIG, Request.GET_TOPIC_STATS_INFO, Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER),
            *(Request.GET_BROKER_CONFIG, Request.GET_BROKER_RUNTIME_INFO, Request.VIEW_BROKER_STATS_DATA),
            *(Request.GET_ALL_CONSUMER_OFFSET, Request.GET_ALL_DELAY_OFFSET, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG),
            *(Request.GET_SUBSCRIPTIONGROUP_CONFIG, Request.GET_CONSUMER_CONNECTION_LIST),
            *(Request.GET_PRODUCER_CONNECTION_LIST, Request.GET_ALL_PRODUCER_INFO, Request.QUERY_TOPIC_CONSUME_BY_WHO),
            *(Request.QUERY_TOPICS_BY_CONSUMER, Request.QUERY_SUBSCRIPTION_BY_CONSUMER, Request.GET_CONSUME_STATS),
            *(Request.GET_BROKER_CONSUME_STATS, Request.QUERY_CONSUME_TIME_SPAN, Request.QUERY_CORRECTION_OFFSET),
            *(Request.QUERY_CONSUME_QUEUE, Request.GET_CONSUMER_RUNNING_INFO),
            *(Request.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Request.LIST_TRANSACTIONS, Request.GET_TRANSACTION),
            *(Request.REPLICA_STATUS, Request.EXPORT_OFFSETS),
        ),
    ),
    # who changes them
    **_of((Action.CREATE,), (Request.UPDATE_AND_CREATE_TOPIC,)),  # of a topic that exists the handler asks for more
    **_of(
        _CHANGE,
        (
            *(Request.PUT_KV_CONFIG, Request.DELETE_KV_CONFIG, Request.UNREGISTER_BROKER, Request.BROKER_HEARTBEAT),
            *(Request.WIPE_WRITE_PERM_OF_BROKER, Request.ADD_WRITE_PERM_OF_BROKER, Request.DELETE_TOPIC_IN_NAMESRV),
            *(Request.DELETE_TOPIC_IN_BROKER, Request.DELETE_SUBSCRIPTIONGROUP, Request.INVOKE_BROKER_TO_RESET_OFFSET),
            *(Request.CLONE_GROUP_OFFSET, Request.CONSUME_MESSAGE_DIRECTLY, Request.CLEAN_EXPIRED_CONSUMEQUEUE),
            *(Request.CLEAN_UNUSED_TOPIC, Request.DELETE_EXPIRED_COMMITLOG, Request.RESUME_CHECK_HALF_MESSAGE),
            *(Request.DECIDE_TRANSACTION, Request.CHANGE_ROLE, Request.HAND_OVER),
        ),
    ),
    **_of(
        _CHANGE,
        (Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, Request.REGISTER_TOPIC_IN_NAMESRV, Request.QUERY_DATA_VERSION),
        ROW_BYTES,
    ),
    **_of(_CHANGE, (Request.UPDATE_BROKER_CONFIG, Request.UPDATE_NAMESRV_CONFIG), SETTINGS_BYTES),
    **_of(_CHANGE, (Request.REGISTER_BROKER,), REGISTRATION_BYTES),
}
"""By code. A code that is missing here cannot be registered."""


def admission(code: int) -> Admission:
    """What the code needs. ``LookupError`` for one that does not say: an error of the program."""
    found = ADMITTED.get(code)
    if found is None:
        raise LookupError(f"metaq.server.remoting.admission does not say who may ask {code}, and how long its body may be")
    return found
