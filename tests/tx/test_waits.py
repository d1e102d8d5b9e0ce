"""State read before a wait, or before another connection's turn, may have changed after it; each test hits that moment."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

import pytest

from metaq.engine.checkback import CheckBack
from metaq.errors import BadRequest
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.replication.election import Election
from metaq.replication.nodes import Candidate, Master, ReplicaGroupState, ReplicaLog
from metaq.server.text.session import TextSession
from metaq.store.copies.epochs import LAST_EPOCH
from metaq.store.files.documents import write_document
from metaq.store.recovery.recovery import open_store
from metaq.tx.halves import SNAPSHOT, Fate, Halves
from tests.server.wire.test_limits import FullStream, Host
from tests.store.test_times_and_places import SETTINGS, put
from tests.support.faultydisk import DATA, FaultyDisk

T = TypeVar("T")

HALF: Final = 5


@pytest.mark.parametrize("number", range(1, 8))
def test_a_half_that_is_decided_while_its_record_is_read(number: int) -> None:
    """P22, E-01: it is decided once, whenever the producer's decision comes; the record is damaged and gives it up."""
    store, _ = open_store(DATA, SETTINGS, disk=FaultyDisk(random.Random(1)))
    log_offset = put(store, "t", b"x" * 100)
    store.disk.open(store.log.segments[0].path).write(b"?" * 80, log_offset)
    folder = DATA / "config"
    store.disk.make_directories(folder)
    write_document(store.disk, folder / SNAPSHOT, {"ordinal": 0, "op": 0, "halves": [[HALF, log_offset, 1, 0, 1]]})
    halves, decisions, reads = Halves(store, folder, 0), [], 0

    def decide(ordinal: int, fate: Fate) -> None:
        halves.claim(ordinal)
        decisions.append(fate)

    def run(call: Callable[[], T]) -> T:
        nonlocal reads
        reads += 1
        if reads == number and halves.find(HALF) is not None:
            decide(HALF, Fate.COMMITTED)
        return call()

    settings = SimpleNamespace(check_interval_ms=1000, max_checks=1, keep_hours=1)
    context = SimpleNamespace(store=store, settings=settings)
    handler = SimpleNamespace(context=context, halves=halves, turns=SimpleNamespace(overloaded=False), decide=decide)
    CheckBack(cast(Any, handler), lambda: None, lambda: False, run).check()
    assert decisions == [Fate.COMMITTED if number <= reads else Fate.GIVEN_UP]


def test_a_session_that_another_one_has_closed() -> None:
    """SG-090: an orderly stop winds up all of them, though one may close others; nothing is read from those."""
    session = TextSession(cast(Any, FullStream()), ("127.0.0.1", 1), CommandReader(TextLimits()), cast(Any, Host()))
    session.close()
    session._on_readable()
    session.wind_up()
    session.finish()
    assert session.closed


class _Tree:
    """The nodes in ZooKeeper, whoever has written them."""

    def __init__(self, nodes: dict[str, bytes]) -> None:
        self._nodes = nodes

    def children(self, path: str) -> list[str]:
        return [name.removeprefix(f"{path}/") for name in self._nodes if name.startswith(f"{path}/")]

    def get(self, path: str) -> Any:
        data = self._nodes.get(path)
        return None if data is None else SimpleNamespace(data=data, version=1)


def test_what_else_stands_among_the_replicas() -> None:
    """F-ZK: somebody's node beside those of the replicas, or one with other data, ends no election."""
    strays = {"lock-0001": b"", "x": b"{}", "3": b"\xff", "4": b"[]", "5": b'{"epoch":"many","end":1}', "6": b'{"epoch":1}'}
    nodes = {f"/metaq/groups/c/b/replicas/{name}": data for name, data in strays.items()}
    nodes["/metaq/groups/c/b/replicas/2"] = Candidate(ReplicaLog(3, 70), -1).encode()
    nothing: Any = None
    election = Election(
        cast(Any, _Tree(nodes)),
        "c/b",
        1,
        "127.0.0.1:1",
        log=nothing,
        elected=nothing,
        deposed=nothing,
        moved=nothing,
        monotonic=nothing,
    )
    assert election._others() == {2: Candidate(ReplicaLog(3, 70), -1)}


@pytest.mark.parametrize("epoch", [-1, 0, LAST_EPOCH, 1 << 40])
def test_a_state_behind_which_there_is_no_epoch(epoch: int) -> None:
    """F-ZK: it is refused where it is read, and not by who is to begin the next one."""
    with pytest.raises(BadRequest, match="cannot be read"):
        ReplicaGroupState.decode(ReplicaGroupState(epoch, 1, (1,)).encode())


@pytest.mark.parametrize("replication", ["", "here", "10.0.0.1:", "10.0.0.1:x"])
def test_a_master_without_an_address(replication: str) -> None:
    """F-ZK: nobody can follow it."""
    with pytest.raises(BadRequest, match="cannot be read"):
        Master.decode(Master(1, 2, replication, "run").encode())
