"""The requests that a slave refuses because they change what its master keeps. The store refuses messages itself."""

from typing import Final

from metaq.errors import NotMaster
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler

CODES: Final = (
    # offsets, locks and retries of groups
    Request.UPDATE_CONSUMER_OFFSET,
    Request.INVOKE_BROKER_TO_RESET_OFFSET,
    Request.CLONE_GROUP_OFFSET,
    Request.LOCK_BATCH_MQ,
    Request.CONSUMER_SEND_MSG_BACK,
    # topics and groups
    Request.UPDATE_AND_CREATE_TOPIC,
    Request.DELETE_TOPIC_IN_BROKER,
    Request.CLEAN_UNUSED_TOPIC,
    Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    Request.DELETE_SUBSCRIPTIONGROUP,
    Request.SET_MESSAGE_REQUEST_MODE,
    # decisions about transactions
    Request.END_TRANSACTION,
    Request.RESUME_CHECK_HALF_MESSAGE,
    Request.DECIDE_TRANSACTION,
)


class MasterOnlyHandler:
    """Replaces, on a slave, a master's handlers of these requests."""

    def requests(self) -> dict[int, RequestHandler]:
        return dict.fromkeys(CODES, self.refuse)

    def refuse(self, _: RemotingSession, request: RemotingCommand) -> Answer:
        """Raise ``NotMaster``, which becomes response code 14 (SERVICE_NOT_AVAILABLE): clients then ask for the route again."""
        raise NotMaster(
            f"this replica is a slave and does not accept the request {Request(request.code).name}; send it to the master"
        )
