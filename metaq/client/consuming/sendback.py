"""Retries: messages that could not be consumed go back to the broker, which delivers them later or dead-letters them."""

import logging

from metaq.client import intercepting
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest
from metaq.client.message import ReceivedMessage, properties_text
from metaq.client.sending.sending import Outgoing, QueueChoice, deliver, send_fields
from metaq.errors import ClientError, RequestTimeout
from metaq.message import RETRY_PREFIX
from metaq.protocol.properties import DELAY, ORIGIN_ID, RETRY_TOPIC
from metaq.protocol.remoting.codes import FIRST_RETRY_LEVEL, INNER_PRODUCER, Request
from metaq.protocol.remoting.headers import Int32, SendBack

logger = logging.getLogger(__name__)

MAX_RECONSUME_TIMES = 16
TO_DEAD_LETTERS = -1
"""The delay level that makes a message a dead letter at once."""


def send_back(core: Core, group: str, message: ReceivedMessage, delay_level: int, most: int, deadline: float) -> None:
    """Have a message delivered to the group again, after the delay of ``delay_level``, or with 0 one that grows each time.

    After ``most`` redeliveries it becomes a dead letter of the group. When its broker does not take it back, a copy is sent to
    any broker. ``ClientError`` when that fails, too; ``RequestTimeout`` when its broker does not answer, and may have it.
    """
    ended = intercepting.settling(core.id, group, "reject" if delay_level == TO_DEAD_LETTERS else "retry", message)
    try:
        _send_back(core, group, message, delay_level, most, deadline)
    except BaseException as error:
        ended(error)
        raise
    ended(None)


def _send_back(core: Core, group: str, message: ReceivedMessage, delay_level: int, most: int, deadline: float) -> None:
    header = SendBack(
        message.log_offset,
        group,
        Int32(delay_level),
        origin_msg_id=message.id,
        origin_topic=message.topic,
        max_reconsume_times=Int32(most),
    )
    try:
        request = RemotingRequest.of(Request.CONSUMER_SEND_MSG_BACK, header)
        core.ask_broker(message.queue.broker_name, request, deadline)
    except RequestTimeout:
        raise  # it may be stored, and no time is left for a copy
    except ClientError as error:
        logger.info("broker did not take back message=%s reason=%s", message.id, error)
        _send_copy(core, group, message, delay_level, most, deadline)


def _send_copy(core: Core, group: str, message: ReceivedMessage, delay_level: int, most: int, deadline: float) -> None:
    topic = f"{RETRY_PREFIX}{group}"
    properties = {**message.properties, RETRY_TOPIC: message.topic}
    properties.setdefault(ORIGIN_ID, message.id)
    # the broker makes a dead letter of a message whose count has reached the limit
    times = most if delay_level == TO_DEAD_LETTERS else message.reconsume_times + 1
    properties[DELAY] = str(max(1, delay_level or FIRST_RETRY_LEVEL + message.reconsume_times))
    body, sys_flag = message._packed()
    fields = send_fields(INNER_PRODUCER, topic, properties_text(properties), sys_flag, message.flag)
    fields |= {"j": str(times), "l": str(most)}
    outgoing = Outgoing(topic, fields, body, Request.SEND_MESSAGE_V2, (message.id,), None)
    deliver(core.transport, QueueChoice(core.routes, core.health), outgoing, deadline)
