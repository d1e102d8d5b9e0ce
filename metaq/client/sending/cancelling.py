"""Cancels of delayed messages."""

import time
from typing import Final

from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest
from metaq.errors import BadRequest, ClientError, Refused
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import RecallMessage
from metaq.protocol.remoting.recall import decode_recall

PAUSE_S: Final = 0.5
"""The pause before another try, in which a broker may come back, or a slave may become master."""


def cancel(core: Core, handle: str, deadline: float) -> None:
    """Cancel a delayed message at the broker that its handle names; see ``Client.cancel``.

    A cancel does the same however often it is made, so there are tries until the deadline.
    """
    try:
        recall = decode_recall(handle)
    except BadRequest as error:
        raise BadRequest(f"{handle[:60]!r} is not a handle that a send has returned") from error
    request = RemotingRequest.of(Request.RECALL_MESSAGE, RecallMessage(recall.topic, handle))
    while True:
        try:
            core.routes.route(recall.topic, deadline)  # names the broker's address
            core.ask_broker(recall.broker_name, request, deadline)
        except ClientError as error:
            if not _may_pass(error) or time.monotonic() + PAUSE_S >= deadline:
                raise
            time.sleep(PAUSE_S)
        else:
            return


def _may_pass(error: ClientError) -> bool:
    return error.retriable or (isinstance(error, Refused) and error.code == Response.SERVICE_NOT_AVAILABLE)
