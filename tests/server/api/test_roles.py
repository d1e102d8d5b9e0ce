"""What a call sees of the broker's role."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import gevent
import pytest

from metaq.engine.role import Replicas
from metaq.server.services.call import Call
from metaq.server.services.messages import ReadQuery, read_messages
from tests.support.served import Served, warm

DEADLINE_S: Final = 60.0
TOPIC: Final = "told"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack, gevent.Timeout(DEADLINE_S):
        served = Served(stack, tmp_path / "data")
        warm(served, TOPIC)
        yield served


def test_a_slave_has_a_reader_that_is_ahead_wait(served: Served) -> None:
    """SG-083: it has yet to copy what the reader has from the master; a master's reader goes to the end."""
    interior, user = served.broker._make_interior(), served.broker.authentication.anonymous
    slave = cast(Replicas, cast(Any, SimpleNamespace(is_master=False)))
    end = served.broker.store.queue(TOPIC, 0).next
    for context, following in ((interior.context, end), (replace(interior.context, replicas=slave), end + 5)):
        call = Call(replace(interior, context=context), user, ("127.0.0.1", 1))
        found = read_messages(call, TOPIC, 0, ReadQuery(offset=end + 5))
        assert (found.messages, found.next, found.end) == ([], following, end)
