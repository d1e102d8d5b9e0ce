"""The corpus of requests against a real broker process, in slices that become segments of their own where they can."""

from collections.abc import Iterator

import pytest

from metaq.protocol.text import CommandReader
from tests.crash.garbage import FLAGS, LIMITS, check_replies, converse
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
    for way, pieces in slicings(case.data if len(case.data) < 2000 else case.data[:2000], seed=0, count=1):
        commands = feed(CommandReader(LIMITS).receive, pieces)
        with broker.connect() as connection:
            data, reset = converse(connection, pieces)
        try:
            check_replies(commands, data, reset=reset)
        except AssertionError as error:
            raise AssertionError(f"{way}: {error}") from error
    assert "Traceback" not in broker.stderr()
