"""The corpus of requests against a real broker process, in slices that become segments of their own where they can."""

from collections.abc import Iterator

import pytest

from metaq.protocol.text.codec import CommandReader
from tests.crash.attack import converse
from tests.crash.garbage import FLAGS, LIMITS, OPENING, check_replies, read_replies
from tests.support.broker import BrokerProcess
from tests.support.wire import feed, slicings
from tests.wire.corpus import Case
from tests.wire.test_text import REQUESTS


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data", *FLAGS) as process:
        yield process


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in REQUESTS])
def test_every_request_is_answered_once_and_in_order(case: Case, broker: BrokerProcess) -> None:
    """MQ-057, MQ-058, MQ-062: one reply to each command, with its opaque; 400 to what is none; quit and END get none."""
    for way, slices in slicings(case.data if len(case.data) < 2000 else case.data[:2000], seed=0, count=1):
        pieces = [OPENING, *slices]
        commands = feed(CommandReader(LIMITS).receive, pieces)
        with broker.connect() as connection:
            data, reset = converse(connection, pieces)
        try:
            check_replies(commands, data, reset=reset)
        except AssertionError as error:
            raise AssertionError(f"{way}: {error}") from error
    assert "Traceback" not in broker.stderr()


@pytest.mark.parametrize("first", [b"get held g 0 0 100 1 wait=30000\r\n", b"create made 2 1\r\n", b"put t 0 1 0 1\r\nx"])
def test_nothing_overtakes_an_answer_that_has_to_wait(first: bytes, broker: BrokerProcess) -> None:
    """MQ-058: clients that match answers by their order get them in the order of their commands, whatever takes time."""
    with broker.connect() as connection:
        data, _ = converse(connection, [first + b"put t 0 1 0 2\r\nyget t g 0 0 1 3\r\nput t 0 1 0 4\r\nzversion 5\r\n"])
    assert [reply.opaque for reply in read_replies(data, may_be_cut=False)] == [1, 2, 3, 4, 5]
