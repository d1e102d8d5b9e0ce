"""The corpus of the text protocol: requests as a broker gets them, replies as a client gets them, however they are cut."""

import typing
from pathlib import Path
from typing import Final

import pytest

from metaq.errors import StreamLost
from metaq.protocol.text.codec import CommandReader, PutHead
from metaq.protocol.text.commands import Command, Invalid
from metaq.protocol.text.replies import Reply
from tests.support.talk import ReplyReader
from tests.support.wire import feed, slicings
from tests.wire.corpus import Case, Refusal, read_corpus

HERE: Final = Path(__file__).parent
REQUESTS: Final = read_corpus(HERE / "text", {kind.__name__: kind for kind in typing.get_args(Command)})
REPLIES: Final = read_corpus(HERE / "replies", {"Reply": Reply})


def agrees(command: Command, expected: object) -> bool:
    if isinstance(expected, Refusal) and isinstance(command, Invalid):
        reason = str(command.error)
        return (type(command.error), command.opaque) == expected[:2] and expected.reason in reason
    return command == expected


def check(reader: CommandReader, pieces: list[bytes], case: Case, way: str) -> None:
    commands = feed(reader.receive, pieces)
    agreed = len(commands) == len(case.expected) and all(map(agrees, commands, case.expected))
    assert agreed, f"{way}: {commands} instead of {case.expected}"
    assert reader.buffered == case.held, way


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in REQUESTS])
def test_requests(case: Case) -> None:
    """MQ-057…MQ-060, MQ-063, MQ-064, MQ-109, MQ-110: every frame means the same whole, byte by byte and in random slices."""
    for way, pieces in slicings(case.data, seed=0):
        check(CommandReader(case.limits), pieces, case, way)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in REQUESTS])
def test_requests_mean_the_same_the_second_time(case: Case) -> None:
    """MQ-059: what readers remember of earlier puts to be quick changes nothing."""
    heads: dict[bytes, PutHead] = {}
    for way, pieces in slicings(case.data, seed=0, count=2):
        check(CommandReader(case.limits, heads), pieces, case, f"{way}, with remembered heads")


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in REPLIES])
def test_replies(case: Case) -> None:
    """MQ-058, MQ-061, MQ-062: replies in any slices, and what is no reply is refused."""
    for way, pieces in slicings(case.data, seed=0):
        replies: list[object] = []
        reader = ReplyReader()
        try:
            for piece in pieces:
                replies += reader.receive(piece)
        except StreamLost as error:
            refusal = case.expected[-1]
            assert isinstance(refusal, Refusal), f"{way}: {error}"
            assert refusal.reason in str(error), way
            replies.append(refusal)
        assert replies == case.expected, way
