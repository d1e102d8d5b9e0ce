"""Numbers of the remoting protocol (specs: remoting protocol, sections 1.4, 1.5, 1.7, 2.1 and 3).

Codes from 30000 to 30099 are metaq's own; docs/remoting.md describes them.
"""

import enum
from typing import Final


class Request(enum.IntEnum):
    """The codes of requests from clients, brokers and administrators."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    REGISTER_TOPIC_IN_NAMESRV = 217
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    UPDATE_NAMESRV_CONFIG = 318
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    QUERY_DATA_VERSION = 322
    RESUME_CHECK_HALF_MESSAGE = 323
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401
    GET_ALL_MESSAGE_REQUEST_MODE = 402
    GET_BROKER_MEMBER_GROUP = 901
    BROKER_HEARTBEAT = 904

    IDENTITY = 30000
    """Ask which process answers at an address: a broker asks its own advertised address, ``metaq doctor`` asks brokers."""
    LIST_TRANSACTIONS = 30010
    GET_TRANSACTION = 30011
    DECIDE_TRANSACTION = 30012
    REPLICA_STATUS = 30020
    CHANGE_ROLE = 30021
    HAND_OVER = 30022
    BULK_FETCH = 30030
    EXPORT_OFFSETS = 30040
    LIST_TIMERS = 30050
    TIMER_STATS = 30051
    LIST_LEASES = 30052
    CRON = 30053
    LIST_OPEN_MESSAGES = 30054
    LEASE_STATS = 30055

    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    PEEK_MESSAGE = 200052
    CHANGE_MESSAGE_INVISIBLETIME = 200053
    NOTIFICATION = 200054
    POLLING_INFO = 200055
    BATCH_ACK_MESSAGE = 200151


class Response(enum.IntEnum):
    """The codes of responses: how a request ended."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    INVALID_PARAMETER = 29
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    POLLING_FULL = 209
    POLLING_TIMEOUT = 210
    FLOW_CONTROL = 215
    ILLEGAL_OPERATION = 604


RESPONSE_FLAG: Final = 1
ONEWAY_FLAG: Final = 2

JSON: Final = 0
COMPACT: Final = 1
"""The two header serializations: JSON text, and the binary one that RocketMQ calls ROCKETMQ."""

LANGUAGES: Final = (
    "JAVA",
    "CPP",
    "DOTNET",
    "PYTHON",
    "DELPHI",
    "ERLANG",
    "RUBY",
    "OTHER",
    "HTTP",
    "GO",
    "PHP",
    "OMS",
    "RUST",
    "NODE_JS",
)
"""The names of the languages that headers carry; the index is the number."""

VERSION: Final = 409
"""V4_9_8: with it clients use SQL92 filters, and none of their code for 5.x brokers."""
VERSION_WITH_MAX_RECONSUME: Final = 121
"""V3_4_9: from it on the ``maxReconsumeTimes`` of a request is used."""
VERSION_WITH_RESET: Final = 28
"""V3_0_7: from it on clients answer the broker's requests 220 and 221."""
VERSION_WITH_TOPIC_VERSION: Final = 37
"""V3_0_11: from it on a registration's body is a RegisterBrokerBody."""

# bits of a pull's sysFlag
PULL_COMMITS_OFFSET: Final = 1
PULL_SUSPENDS: Final = 2
PULL_HAS_SUBSCRIPTION: Final = 4
PULL_CLASS_FILTER: Final = 8
PULL_LITE: Final = 16

# permission bits of topics and queues
INHERIT: Final = 1
WRITE: Final = 2
READ: Final = 4

# bits of a topic's sysFlag
UNIT: Final = 1
"""Divided into the units of a partitioned application."""
UNIT_SUBSCRIBED: Final = 2
"""Consumed by units of a partitioned application."""

MASTER: Final = 0
"""The brokerId of a master; slaves have other numbers."""
FAST_PORT_BELOW: Final = 2
"""Old clients and slaves look for a broker's second port this far below the first (specs: remoting protocol, section 1.8)."""
FIRST_RETRY_LEVEL: Final = 3
"""Delay level of the first retry when the consumer names none; each further retry is one level higher."""
INNER_PRODUCER: Final = "CLIENT_INNER_PRODUCER"
"""The producer group that every Java client joins, whatever it does."""
ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"
"""The namespace of ordered topics in a registry: topic → ``broker-a:4;broker-b:4``, brokers with their numbers of queues."""
