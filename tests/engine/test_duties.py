"""The duties that look after the store go on, whatever goes wrong in one round of them."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import gevent
import pytest

from metaq.clock import SystemClock
from metaq.config import load
from metaq.engine.duties import Duties
from metaq.engine.role import NoReplicas


@pytest.mark.parametrize("error", [ValueError("unexpected"), OSError("unexpected")])
def test_a_duty_survives_its_failures(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """SG-066, SG-068: the next round comes, and the failure is in the log with its place."""
    store = SimpleNamespace(clock=SystemClock(), shortage=None)
    context = cast(
        Any,
        SimpleNamespace(settings=load(None, {}, {}), store=store, topics=None, groups=None, modes=None, replicas=NoReplicas()),
    )
    duties = Duties(context, cast(Any, None), cast(Callable[..., Any], None))
    rounds: list[int] = []

    def fails() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise error

    with caplog.at_level(logging.ERROR):
        duties.every(0.001, fails)
        deadline = store.clock.monotonic() + 30
        while len(rounds) < 3 and store.clock.monotonic() < deadline:
            gevent.sleep(0.001)
    duties.pause()
    assert len(rounds) >= 3
    assert "duty failed duty=fails" in caplog.text
    assert "unexpected" in caplog.text
