"""A client and several registries: which one it asks, how often, and what it does when that one goes away."""

import contextlib
import logging
import math
import time
from typing import Final, cast

import pytest

from metaq.client.connecting import core
from metaq.client.connecting.core import Core
from metaq.client.connecting.routing import Routes
from metaq.client.connecting.transport import RemotingRequest, Transport
from metaq.errors import NotConnected, RequestTimeout, RouteNotFound
from metaq.protocol.remoting.codes import JSON, RESPONSE_FLAG, VERSION, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from tests.support.broker import wait_until
from tests.support.fakeremoting import FakeRemoting, route_to

DEADLINE_S: Final = 60.0
QUESTION: Final = Request.GET_ROUTEINFO_BY_TOPIC


def test_one_registry_is_asked_again_and_again_until_it_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-116: over one connection, drawn at random; routes are refreshed, here more often than every 30 s; then the other."""
    assert core.ROUTES_S == 30
    monkeypatch.setattr(core, "ROUTES_S", 0.02)
    with contextlib.ExitStack() as stack:
        servers = [FakeRemoting(get_routeinfo_by_topic=route_to({"b": "127.0.0.1:1"})) for _ in range(2)]
        running = [stack.enter_context(contextlib.ExitStack()) for _ in servers]
        for server, own in zip(servers, running, strict=True):
            own.enter_context(server)
        client = Core([server.address for server in servers], timeout_s=DEADLINE_S)
        stack.callback(client.close)
        assert client.routes.refresh("orders", client.deadline()) is not None
        asked = 0 if servers[0].requests else 1
        chosen, other = servers[asked], servers[1 - asked]
        wait_until(lambda: chosen.count(QUESTION) > 3, DEADLINE_S, "the route is refreshed")
        assert (len(chosen.connections), len(other.connections), other.requests) == (1, 0, [])
        running[asked].close()
        wait_until(lambda: other.count(QUESTION) > 3, DEADLINE_S, "the other registry is asked")
        assert len(other.connections) == 1


def test_registries_are_chosen_at_random() -> None:
    """SG-116: with two of them, a hundred clients do not all ask the same one."""
    answer = route_to({"b": "127.0.0.1:1"})
    with FakeRemoting(get_routeinfo_by_topic=answer) as one, FakeRemoting(get_routeinfo_by_topic=answer) as two:
        for _ in range(100):  # all the same: once in 2^99 runs
            client = Core([one.address, two.address], timeout_s=DEADLINE_S)
            client.routes.refresh("orders", client.deadline())
            client.close()
        assert one.requests
        assert two.requests


class Sometimes:
    """A transport that reaches nobody as long as there is an outage."""

    outage = True

    def call(self, address: str, request: RemotingRequest, deadline: float) -> RemotingCommand:
        if self.outage:
            raise NotConnected(f"nobody listens at {address}")
        return RemotingCommand(Response.TOPIC_NOT_EXIST, 0, RESPONSE_FLAG, {}, b"", None, "PYTHON", VERSION, JSON)


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It is asked about some times a second. When the registry has answered in between, the next one is logged, too."""
    caplog.set_level(logging.INFO)
    transport = Sometimes()
    routes = Routes(["127.0.0.1:1"], cast(Transport, transport))
    for transport.outage in (True, True, False, True, True):
        with contextlib.suppress(RouteNotFound):
            assert routes.refresh("orders", math.inf) is None
    assert [record.msg.partition(" address")[0] for record in caplog.records] == ["registry does not answer"] * 2


class Mute:
    """A transport to registries that never answer; it notes how long each had, in seconds."""

    def __init__(self) -> None:
        self.had: list[float] = []

    def call(self, address: str, request: RemotingRequest, deadline: float) -> RemotingCommand:
        self.had.append(deadline - time.monotonic())
        raise RequestTimeout(f"no answer from {address}")


@pytest.mark.parametrize("count", [1, 3])
def test_the_last_registry_has_the_rest_of_the_time(count: int) -> None:
    """Others have some seconds; a slow one is better than none."""
    transport = Mute()
    routes = Routes([f"127.0.0.1:{number}" for number in range(1, count + 1)], cast(Transport, transport))
    with pytest.raises(RouteNotFound, match="no answer"):
        routes.refresh("orders", time.monotonic() + DEADLINE_S)
    *others, last = transport.had
    assert len(others) == count - 1
    assert max(others, default=0) < 5 < DEADLINE_S - 5 < last
