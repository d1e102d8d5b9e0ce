"""Cancels of delayed messages."""

from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest
from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.headers import RecallMessage
from metaq.protocol.remoting.recall import decode_recall


def cancel(core: Core, handle: str, deadline: float) -> None:
    """Cancel a delayed message at the broker that its handle names; see ``Client.cancel``."""
    try:
        recall = decode_recall(handle)
    except BadRequest as error:
        raise BadRequest(f"{handle[:60]!r} is not a handle that a send has returned") from error
    core.routes.route(recall.topic, deadline)  # names the broker's address
    request = RemotingRequest.of(Request.RECALL_MESSAGE, RecallMessage(recall.topic, handle))
    core.ask_broker(recall.broker_name, request, deadline)
