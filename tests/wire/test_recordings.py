"""Recorded frames of real clients are read as the clients meant them, however they are cut."""

from typing import Any, Final

import pytest

from metaq.protocol.remoting import headers
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand
from metaq.protocol.remoting.headers import decode_header, with_names
from metaq.protocol.remoting.heartbeats import decode_heartbeat, decode_queue_set
from tests.support.wire import feed, slicings
from tests.wire.recordings import Recording, read_recordings

RECORDINGS: Final = read_recordings()
HEADERS: Final[dict[int, type[tuple[Any, ...]]]] = {
    Request.SEND_MESSAGE: headers.SendMessage,
    Request.SEND_MESSAGE_V2: headers.SendMessage,
    Request.SEND_BATCH_MESSAGE: headers.SendMessage,
    Request.SEND_REPLY_MESSAGE: headers.SendMessage,
    Request.SEND_REPLY_MESSAGE_V2: headers.SendMessage,
    Request.PULL_MESSAGE: headers.PullMessage,
    Request.QUERY_MESSAGE: headers.QueryMessage,
    Request.QUERY_CONSUMER_OFFSET: headers.QueryConsumerOffset,
    Request.UPDATE_CONSUMER_OFFSET: headers.UpdateConsumerOffset,
    Request.VIEW_MESSAGE_BY_ID: headers.ViewMessage,
    Request.UNREGISTER_CLIENT: headers.UnregisterClient,
    Request.CONSUMER_SEND_MSG_BACK: headers.SendBack,
    Request.GET_CONSUMER_LIST_BY_GROUP: headers.ConsumerGroupOnly,
    Request.GET_ROUTEINFO_BY_TOPIC: headers.TopicOnly,
    Request.GET_CONSUME_STATS: headers.GetConsumeStats,
    Request.INVOKE_BROKER_TO_RESET_OFFSET: headers.ResetOffset,
}
BODIES: Final = {
    Request.HEART_BEAT: decode_heartbeat,
    Request.LOCK_BATCH_MQ: decode_queue_set,
    Request.UNLOCK_BATCH_MQ: decode_queue_set,
}


def check(command: RemotingCommand) -> None:
    kind, read = HEADERS.get(command.code), BODIES.get(Request(command.code))
    if kind is not None:
        decode_header(kind, with_names(command.fields))
    if read is not None:
        read(command.body)


@pytest.mark.parametrize("client", sorted({recording.client for recording in RECORDINGS}))
def test_a_client_is_understood(client: str) -> None:
    """SG-096, RD-019: every frame of every connection, and the header and body of every request."""
    recordings = [recording for recording in RECORDINGS if recording.client == client]
    assert sum(len(recording.frames) for recording in recordings) > 300
    said = set()
    for recording in recordings:
        for command in read_whole(recording):
            if not command.is_response:
                said.add(command.code)
                check(command)
    assert said >= {Request.SEND_BATCH_MESSAGE, Request.PULL_MESSAGE, Request.HEART_BEAT, Request.CONSUMER_SEND_MSG_BACK}


def read_whole(recording: Recording) -> list[RemotingCommand]:
    """A connection's frames, read in several ways with one result."""
    data = b"".join(recording.frames)
    (_, pieces), *others = slicings(data, seed=0, count=1)
    commands = feed(FrameReader().receive, pieces)
    assert len(commands) == len(recording.frames)
    for way, pieces in others:
        assert feed(FrameReader().receive, pieces) == commands, way
    return commands
