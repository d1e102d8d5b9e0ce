"""The state of a group member for the answer to 307, with RocketMQ's names (specs: remoting protocol, section 3.3)."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from metaq.client.consuming.fetching import Fetcher
from metaq.message import MessageQueue
from metaq.protocol.remoting.heartbeats import subscription_row
from metaq.protocol.subscription import Subscription


def running_info(
    *,
    registries: Sequence[str],
    kind: str,
    started_ms: int,
    ordered: bool,
    subscriptions: Sequence[Subscription],
    queues: Mapping[MessageQueue, dict[str, Any]],
) -> dict[str, Any]:
    """Return the state of a member; ``queues`` are of ``queue_info``, ``kind`` is that in heartbeats."""
    properties = {
        "PROP_NAMESERVER_ADDR": ";".join(registries),
        "PROP_CONSUME_TYPE": kind,
        "PROP_CLIENT_VERSION": "V4_9_8",
        "PROP_CONSUMER_START_TIMESTAMP": str(started_ms),
        "PROP_CONSUMEORDERLY": "true" if ordered else "false",
        "PROP_THREADPOOL_CORE_SIZE": "0",
    }
    return {
        "properties": properties,
        "subscriptionSet": [subscription_row(subscription) for subscription in subscriptions],
        "mqTable": queues,
        "statusTable": {},
    }


def queue_info(fetcher: Fetcher, committed: int, *, locked: bool) -> dict[str, Any]:
    """Return the state of one queue."""
    age_ms = round((time.monotonic() - fetcher.pulled) * 1000)
    return {
        "cachedMsgCount": fetcher.buffered,
        "cachedMsgMinOffset": 0,
        "cachedMsgMaxOffset": 0,
        "cachedMsgSizeInMiB": 0,
        "commitOffset": committed,
        "droped": fetcher.stopped,
        "lastConsumeTimestamp": 0,
        "lastLockTimestamp": 0,
        "lastPullTimestamp": time.time_ns() // 1_000_000 - age_ms,
        "locked": locked,
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }
