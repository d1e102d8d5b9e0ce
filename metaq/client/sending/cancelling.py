"""Cancels of delayed messages."""

import time
from typing import Final

from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, may_pass
from metaq.errors import BadRequest, ClientError, RouteNotFound
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.headers import RecallMessage
from metaq.protocol.remoting.recall import decode_recall

PAUSE_S: Final = 0.5
"""The pause before another try, in which a broker may come back, or a slave may become master; and the least time that is left
to that try, so that its answer is known rather than in doubt."""


def cancel(core: Core, handle: str, deadline: float) -> None:
    """Cancel a delayed message at the broker that its handle names; see ``Client.cancel``.

    A cancel does the same however often it is made, so there are tries until the deadline.
    """
    try:
        recall = decode_recall(handle)
    except BadRequest as error:
        raise BadRequest(f"{handle[:60]!r} is not a handle that a send has returned") from error
    request = RemotingRequest.of(Request.RECALL_MESSAGE, RecallMessage(recall.topic, handle))
    is_known = core.routes.address(recall.broker_name) is not None
    while True:
        try:
            if not is_known:
                _find_brokers(core, recall.topic, recall.broker_name, deadline)
            core.ask_broker(recall.broker_name, request, deadline)
        except ClientError as error:
            if not may_pass(error) or time.monotonic() + 2 * PAUSE_S >= deadline:
                raise
            is_known = False  # another replica may be its master by now
            time.sleep(PAUSE_S)
        else:
            return


def _find_brokers(core: Core, topic: str, broker_name: str, deadline: float) -> None:
    """Learn where the brokers of a topic are, also of one that is not there yet: its messages may all be delayed.

    ``RouteNotFound`` when the topic's route does not name the broker.
    """
    core.routes.forget(topic)
    try:
        core.routes.writable(topic, deadline)
    except RouteNotFound:
        if core.routes.address(broker_name) is None:  # otherwise the topic has a route, and takes no messages now
            raise
