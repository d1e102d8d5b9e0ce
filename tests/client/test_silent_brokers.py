"""A broker that does not answer takes no time from what is asked of others, and is not taken for one that has answered."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from metaq.client.connecting.core import CONTROL_TIMEOUT_S, Core
from metaq.client.connecting.transport import Done, RemotingRequest
from metaq.client.consuming.offsets import BrokerOffsets
from metaq.client.consuming.sharing import Model, Sharing
from metaq.errors import NotConnected, RequestTimeout
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.remoting.codes import JSON, RESPONSE_FLAG, Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.registry.assign import average


class Brokers:
    """Brokers ``a`` to ``f`` by name, each a master at ``a:0`` and so on, and a clock.

    To connect to one of those that have ``vanished``, or to wait for an answer of those that are ``silent``, takes the time
    that there is; those that are ``refusing`` refuse a connection at once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, slaves: int = 0) -> None:
        self.now = 1000.0
        self.vanished: set[str] = set()
        self.silent: set[str] = set()
        self.refusing: set[str] = set()
        self.asked: list[str] = []
        self.later: list[Done] = []
        """Those who wait for an answer of a silent broker."""
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        transport: Any = SimpleNamespace(call=self._call, submit=self._submit)
        self.core = Core(["registry:1"], timeout_s=60.0, make_transport=lambda asked, greeting: transport)
        routes = SimpleNamespace(
            replicas=lambda name: {number: f"{name}:{number}" for number in range(1 + slaves)},
            address=lambda name: f"{name}:0",
            readable=lambda topic, deadline: [MessageQueue(topic, name, 0) for name in "abcdef"],
        )
        monkeypatch.setattr(self.core, "routes", routes)
        monkeypatch.setattr(self.core, "look_for_masters", lambda: None)

    def _connect(self, address: str, deadline: float) -> None:
        if deadline <= self.now:
            raise RequestTimeout(f"the time of a request to {address} was over before it was sent")
        if address in self.refusing:
            raise NotConnected(f"{address} refuses")
        if address in self.vanished:
            self.now = min(deadline, self.now + CONTROL_TIMEOUT_S)
            raise NotConnected(f"cannot connect to {address}")
        self.asked.append(address)

    def _call(self, address: str, request: RemotingRequest, deadline: float) -> RemotingCommand:
        self._connect(address, deadline)
        if address in self.silent:
            self.now = deadline
            raise RequestTimeout(f"no answer from {address}")
        return self.answer({"consumerIdList": [self.core.id]}, fields={"offset": "7"})

    def _submit(self, address: str, request: RemotingRequest, deadline: float, done: Done) -> None:
        self._connect(address, deadline)
        if address in self.silent:
            self.later.append(done)
        else:
            done(self.answer({}))

    @staticmethod
    def answer(content: dict[str, Any], fields: dict[str, str] | None = None) -> RemotingCommand:
        return RemotingCommand(0, 1, RESPONSE_FLAG, fields or {}, orjson.dumps(content), None, "JAVA", 409, JSON)

    def took(self, call: Callable[[], object]) -> float:
        """The seconds that a call takes; ``asked`` is what it asks."""
        self.asked.clear()
        began = self.now
        call()
        return self.now - began


@pytest.mark.parametrize("how", ["silent", "vanished"])
def test_members_are_learned_from_the_brokers_that_answer(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """SG-118: each has a time of its own, and one that did not answer is asked last from then on."""
    brokers = Brokers(monkeypatch)
    getattr(brokers, how).update({"a:0", "b:0", "c:0", "d:0"})
    sharing = Sharing(brokers.core, "billing", Model.CLUSTERING, average)
    assert brokers.took(lambda: sharing.share("orders")) == 3 * CONTROL_TIMEOUT_S, "no more than that at one time"
    assert sharing.share("orders").queues is not None
    assert brokers.took(lambda: sharing.share("orders")) == 0
    assert brokers.asked == ["e:0"]
    getattr(brokers, how).clear()
    getattr(brokers, how).update({"e:0", "f:0"})
    assert brokers.took(lambda: sharing.share("orders")) == 2 * CONTROL_TIMEOUT_S
    assert brokers.asked[-1] == "a:0"


@pytest.mark.parametrize("how", ["silent", "vanished"])
def test_a_slave_is_asked_while_its_master_does_not_answer(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """SG-083: each replica has its share of the time."""
    brokers = Brokers(monkeypatch, slaves=2)
    getattr(brokers, how).update({"a:0", "a:1"})
    answers: list[RemotingCommand] = []

    def ask() -> None:
        request = RemotingRequest(Request.GET_CONSUMER_LIST_BY_GROUP)
        answers.append(brokers.core.call_any("a", request, brokers.now + CONTROL_TIMEOUT_S, shares_time=True))

    assert brokers.took(ask) == pytest.approx(2.0)
    assert brokers.asked[-1] == "a:2"
    brokers.silent.add("a:2")
    with pytest.raises(RequestTimeout, match="no answer from a:2"):
        ask()
    assert len(answers) == 1


def test_an_offset_is_read_at_a_slave_only_while_the_master_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slave may not know the last commits: while its master is only slow, the queue waits for it."""
    brokers = Brokers(monkeypatch, slaves=1)
    brokers.silent.add("a:0")
    offsets, queue = BrokerOffsets(brokers.core, "billing"), MessageQueue("orders", "a", 0)

    def read() -> None:
        with pytest.raises(RequestTimeout, match="no answer from a:0"):
            offsets.read(queue, brokers.now + CONTROL_TIMEOUT_S)

    assert brokers.took(read) == CONTROL_TIMEOUT_S
    assert brokers.asked == ["a:0"]
    brokers.refusing.add("a:0")
    assert offsets.read(queue, brokers.now + CONTROL_TIMEOUT_S) == 7
    assert brokers.asked == ["a:0", "a:1"]


def test_an_offset_is_read_at_a_slave_when_the_host_of_the_master_has_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    """To learn that, connecting takes all the time there is."""
    brokers = Brokers(monkeypatch, slaves=1)
    brokers.vanished.add("a:0")
    offsets, queue = BrokerOffsets(brokers.core, "billing"), MessageQueue("orders", "a", 0)
    assert offsets.read(queue, brokers.now + CONTROL_TIMEOUT_S) == 7
    assert brokers.asked == ["a:1"]


@pytest.mark.parametrize("how", ["silent", "vanished"])
def test_a_commit_reaches_the_brokers_that_answer(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """SG-118: they get their offsets before others are waited for; the caller learns that not all are stored."""
    brokers = Brokers(monkeypatch)
    getattr(brokers, how).add("a:0")
    offsets = BrokerOffsets(brokers.core, "billing")
    queues = [MessageQueue("orders", name, 0) for name in "abc"]
    for queue in queues:
        offsets.update(queue, QueueOffset(7))

    def save() -> None:
        with pytest.raises(NotConnected if how == "vanished" else RequestTimeout):
            offsets.save(deadline=brokers.now + (CONTROL_TIMEOUT_S if how == "vanished" else 0.05))

    brokers.took(save)
    assert [address for address in brokers.asked if address != "a:0"] == ["b:0", "c:0"]
    getattr(brokers, how).clear()
    assert brokers.took(lambda: offsets.save(deadline=brokers.now + CONTROL_TIMEOUT_S)) == 0
    assert brokers.asked == ["a:0"]


def of_silent(monkeypatch: pytest.MonkeyPatch) -> tuple[Brokers, BrokerOffsets, MessageQueue]:
    """Return brokers of which ``a`` is silent, the offsets of a group, and a queue of ``a``."""
    brokers = Brokers(monkeypatch)
    brokers.silent.add("a:0")
    return brokers, BrokerOffsets(brokers.core, "billing"), MessageQueue("orders", "a", 0)


def test_a_commit_returns_only_when_a_broker_has_stored_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-118: what was sent before in the background is told again while it has no answer."""
    brokers, offsets, queue = of_silent(monkeypatch)
    offsets.update(queue, QueueOffset(7))
    offsets.save()
    with pytest.raises(RequestTimeout):
        offsets.save(deadline=brokers.now + CONTROL_TIMEOUT_S)
    brokers.silent.clear()
    offsets.save(deadline=brokers.now + CONTROL_TIMEOUT_S)
    assert brokers.asked == ["a:0"] * 3
    brokers.later.pop()(RequestTimeout("no answer"))
    offsets.save(deadline=brokers.now + CONTROL_TIMEOUT_S)
    assert brokers.asked == ["a:0"] * 3, "what is stored is told once"


def test_an_answer_to_an_earlier_offset_says_nothing_about_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-118: and a failure of the later one has it told again."""
    brokers, offsets, queue = of_silent(monkeypatch)
    for number in (7, 8):
        offsets.update(queue, QueueOffset(number))
        offsets.save()
    first, second = brokers.later
    first(brokers.answer({}))
    brokers.silent.clear()
    offsets.save(deadline=brokers.now + CONTROL_TIMEOUT_S)
    assert brokers.asked == ["a:0"] * 3
    offsets.update(queue, QueueOffset(9))
    brokers.silent.add("a:0")
    offsets.save()
    brokers.later[-1](RequestTimeout("no answer"))
    brokers.silent.clear()
    offsets.save()
    assert brokers.asked == ["a:0"] * 5
    second(RequestTimeout("no answer"))
    offsets.save()
    assert brokers.asked == ["a:0"] * 5


def test_a_commit_tells_an_offset_again_whose_failure_is_just_being_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so already while the one that has failed looks for a new master."""
    brokers, offsets, queue = of_silent(monkeypatch)
    offsets.update(queue, QueueOffset(7))
    offsets.save()
    brokers.silent.clear()
    monkeypatch.setattr(brokers.core, "look_for_masters", lambda: offsets.save(deadline=brokers.now + CONTROL_TIMEOUT_S))
    brokers.later[0](RequestTimeout("no answer"))
    assert brokers.asked == ["a:0"] * 2


def test_a_queue_that_is_forgotten_while_its_offset_is_told_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    brokers.silent.add("b:0")
    offsets, queues = BrokerOffsets(brokers.core, "billing"), [MessageQueue("orders", name, 0) for name in "ab"]
    for queue in queues:
        offsets.update(queue, QueueOffset(7))
    usual = brokers.core.master

    def master(name: str) -> str:
        offsets.forget(queues[1])
        return usual(name)

    monkeypatch.setattr(brokers.core, "master", master)
    offsets.save()
    brokers.later.pop()(RequestTimeout("no answer"))
    offsets.save(deadline=brokers.now + CONTROL_TIMEOUT_S)
    assert brokers.asked == ["a:0", "b:0"]
