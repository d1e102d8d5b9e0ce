"""Settling leases, beside a client whose answers the test gives."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

from kombu.utils.json import dumps
from kombu_metaq.leases import LeaseReader

from metaq.errors import ConnectionFailed, LeaseLost

GOOD: Final = dumps({"properties": {"delivery_info": {"routing_key": ""}}}).encode()


class Message:
    """A message as its body is read."""

    def __init__(self, body: bytes) -> None:
        self.id = "1"
        self.body = body
        self.error = None


class Lease:
    """A lease that lasts as long as the test says."""

    def __init__(self, body: bytes = GOOD) -> None:
        self.message = Message(body)
        self.attempt = 1
        self.usable = True

    def is_usable(self, now_s: float) -> bool:
        return self.usable


class Holder:
    """The part of a client that leases, which answers nothing by itself."""

    def __init__(self, *leases: Lease) -> None:
        self.group = "group"
        self.closed = False
        self.on_change: Callable[[], None] = lambda: None
        self.here = list(leases)
        self.wanted = 0
        self.told: list[tuple[str, Future[None]]] = []
        self.left: list[Lease] = []

    def begin_handlers(self, retry: None) -> None:
        pass

    @contextmanager
    def waiting(self, until_s: float) -> Iterator[None]:
        self.wanted += 1
        yield
        self.wanted -= 1

    def take(self, *, is_handled: bool) -> Lease | None:
        assert is_handled
        return self.here.pop(0) if self.here else None

    def ack(self, lease: Lease) -> Future[None]:
        return self._tell("ack")

    def nack(self, lease: Lease, delay_s: float) -> Future[None]:
        assert delay_s == 0.0
        return self._tell("nack")

    def reject(self, lease: Lease) -> Future[None]:
        return self._tell("reject")

    def _tell(self, what: str) -> Future[None]:
        told: Future[None] = Future()
        self.told.append((what, told))
        return told

    def handled(self, lease: Lease) -> None:
        self.left.append(lease)

    @property
    def words(self) -> list[str]:
        return [word for word, _ in self.told]


def reader_of(holder: Holder, rings: list[str]) -> LeaseReader:
    consumer: Any = type("Consumer", (), {"_holder": holder})()
    return LeaseReader(consumer, lambda: rings.append("ring"))


def test_an_ack_is_repeated_while_its_broker_is_away_and_the_lease_lasts() -> None:
    lease = Lease()
    holder, rings = Holder(lease), list[str]()
    reader = reader_of(holder, rings)
    reader.want(1)
    delivery = reader.take()
    assert delivery is not None
    delivery.ack()
    for _ in range(2):
        holder.told[-1][1].set_exception(ConnectionFailed("away"))
    assert (holder.words, holder.left) == (["ack", "ack", "ack"], [])
    holder.told[-1][1].set_result(None)
    assert (holder.left, rings) == ([lease], ["ring"])


def test_an_ack_is_not_repeated_when_the_lease_is_over_or_lost() -> None:
    for error, usable in ((ConnectionFailed("away"), False), (LeaseLost(1, "given to another"), True)):
        lease = Lease()
        holder = Holder(lease)
        delivery = reader_of(holder, []).take()
        assert delivery is not None
        lease.usable = usable
        delivery.ack()
        holder.told[0][1].set_exception(error)
        assert (holder.words, holder.left) == (["ack"], [lease])


def test_what_is_given_back_or_rejected_is_told_once() -> None:
    holder = Holder(Lease(), Lease())
    reader = reader_of(holder, [])
    for settle in ("give_back", "reject"):
        delivery = reader.take()
        assert delivery is not None
        getattr(delivery, settle)()
        holder.told[-1][1].set_exception(ConnectionFailed("away"))
    assert holder.words == ["nack", "reject"]
    assert len(holder.left) == 2


def test_what_comes_when_nothing_is_wanted_goes_to_others() -> None:
    holder, rings = Holder(), list[str]()
    reader = reader_of(holder, rings)
    reader.want(2)
    assert holder.wanted == 2
    holder.here.append(Lease())
    holder.on_change()
    assert (holder.words, rings) == ([], ["ring"])
    reader.want(0)
    assert (holder.wanted, holder.words) == (0, ["nack"])
    holder.here.append(Lease())
    holder.on_change()
    assert (holder.words, rings) == (["nack", "nack"], ["ring"])


def test_what_cannot_be_read_is_rejected_and_the_next_one_taken() -> None:
    bodies = [
        b"",
        b"[1]",
        b"{}",
        b'{"properties": 1}',
        b'{"properties": {}}',
        b"[" * 100_000,
        b"\xff",
        b'{"__type__": "uuid", "__value__": 1}',
        b'{"__type__": "decimal", "__value__": "abc"}',
    ]
    bodies += [
        GOOD.replace(b'""', b"1"),
        GOOD.replace(b"{", b'{"headers": [1], ', 1),
        GOOD.replace(b"{", b'{"body": "a", ', 1).replace(b'{"delivery', b'{"body_encoding": "base64", "delivery'),
    ]
    bad = [Lease(body) for body in bodies]
    holder = Holder(*bad, Lease())
    delivery = reader_of(holder, []).take()
    assert delivery is not None
    assert holder.words == ["reject"] * len(bad)
