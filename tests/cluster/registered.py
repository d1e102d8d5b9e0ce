"""Brokers without elections, registered in a real ZooKeeper, and a producer that found them there and goes on sending.

Whatever happens to ZooKeeper or the connections to it, no send fails that reaches a broker; afterwards every broker is there
again with all its nodes, the registry of each knows all of them, and they have every message that was acknowledged.
"""

import contextlib
import threading
import time
from pathlib import Path
from typing import Final

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError

from metaq.client import TextClient, connect
from metaq.errors import ClientError, RequestTimeout
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.routes import decode_cluster_info
from metaq.registry.paths import TOPICS_TO_SUBSCRIBE, Layout, RegisteredReplica, Replica
from tests.crash.command import expect
from tests.support.broker import BrokerProcess, wait_until
from tests.support.proxy import Proxy
from tests.support.remoting import RemotingClient
from tests.support.zookeeper import ZooKeeperProcess

TOPIC: Final = "plain"
SEND_S: Final = 3.0
"""Within which a send is answered."""
PAUSE_S: Final = 0.02
LATE_S: Final = 3.0
"""How late anything may be on a machine that has other things to do."""
STUCK_S: Final = 60.0
FIRST_NUMBER: Final = 10
"""Of the brokers; smaller ones are for others in the same ZooKeeper."""
LAYOUT: Final = Layout()


class Sender(threading.Thread):
    """Sends to all brokers in turn until it is stopped. A send may only fail by a broker that does not answer at all."""

    def __init__(self, zookeeper: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: dict[str, list[bytes]] = {}
        """Bodies by the name of the broker that took them."""
        self.failures: list[str] = []
        self.unanswered = 0
        self.some_stopped = False
        """Whether a broker is stopped, so that a send to it is not answered."""
        self._zookeeper = zookeeper
        self._stopping = threading.Event()
        self._began = 0.0
        self._slowest_s = 0.0

    def run(self) -> None:
        with connect(f"zk://{self._zookeeper}", timeout_s=SEND_S) as client, client.producer() as producer:
            number = 0
            while not self._stopping.wait(PAUSE_S):
                number += 1
                body, self._began = b"%d" % number, time.monotonic()
                try:
                    self.acknowledged.setdefault(producer.send(TOPIC, body).queue.broker_name, []).append(body)
                except RequestTimeout as error:
                    self.unanswered += 1
                    if not self.some_stopped:
                        self.failures.append(repr(error))
                except ClientError as error:
                    self.failures.append(repr(error))
                self._slowest_s = max(self._slowest_s, time.monotonic() - self._began)

    @property
    def sent(self) -> int:
        """How many were acknowledged."""
        return sum(map(len, self.acknowledged.values()))

    def check(self) -> None:
        """No send has failed, and none takes too long now."""
        expect(not self.failures, f"{len(self.failures)} sends have failed", self.failures[:3])
        expect(self.is_alive() and time.monotonic() - self._began < SEND_S + LATE_S, "the producer goes on")

    def stop(self) -> None:
        self._stopping.set()
        self.join()


class Registered(contextlib.ExitStack):
    """So many brokers and the producer, from entering the ``with`` block until leaving it."""

    def __init__(self, folder: Path, server: ZooKeeperProcess, count: int, session_ms: int, seed: int) -> None:
        super().__init__()
        self.session_s = session_ms / 1000
        self._server = server
        self.ways: list[Proxy] = []
        """Of each broker to ZooKeeper."""
        self.brokers: list[BrokerProcess] = []
        self._numbers = range(FIRST_NUMBER, FIRST_NUMBER + count)
        self._names = {f"b{number}" for number in self._numbers}
        for number in self._numbers:
            way = self.enter_context(Proxy("127.0.0.1", server.port, seed=seed * 100 + number))
            flags = ["--zookeeper", way.address, "--zookeeper-session-ms", str(session_ms)]
            flags += ["--broker-number", str(number), "--broker-name", f"b{number}"]
            self.ways.append(way)
            self.brokers.append(BrokerProcess(folder / f"plain{number}", *flags))
        self.sender = Sender(server.address)

    def __enter__(self) -> "Registered":
        try:
            for broker in self.brokers:
                self.callback(broker.kill)
                broker.launch()
            for broker in self.brokers:
                broker.wait_ready()
                with TextClient(broker.host, broker.port) as text:
                    text.create(TOPIC, 2)
            wait_until(lambda: None not in self.sessions(), STUCK_S, "all brokers are registered")
            wait_until(self.all_known, STUCK_S, "every registry knows all brokers")
            self.sender.start()
            self.callback(self.sender.stop)
            wait_until(lambda: self._names == self.sender.acknowledged.keys(), STUCK_S, "every broker is used")
        except BaseException:
            self.close()
            raise
        return self

    def sessions(self) -> list[int | None]:
        """To whose session the nodes of each broker belong; ``None`` while not all of them stand. ZooKeeper runs."""
        with self._server.client() as look:  # a new one: who has seen a later state is not served by a ZooKeeper that was wiped
            return [_session(look, number) for number in self._numbers]

    def all_known(self) -> bool:
        """Return whether the registry of each broker knows all brokers."""
        return all(self._names <= self.known_to(broker) for broker in self.brokers)

    def known_to(self, broker: BrokerProcess) -> set[str]:
        """The brokers that the registry of one tells."""
        host, _, port = broker.registry.rpartition(":")
        with RemotingClient(host, int(port)) as client:
            return set(decode_cluster_info(client.call(Request.GET_BROKER_CLUSTER_INFO).body).brokers)

    def wait_again(self, back: float) -> float:
        """Wait until all nodes stand there; how long it took since ``back``. :class:`Violation` when that was too long."""
        wait_until(lambda: None not in self.sessions(), STUCK_S, "all brokers are registered again")
        seconds = time.monotonic() - back
        expect(seconds < 2 * self.session_s + LATE_S, f"all brokers are registered again after {seconds:.1f} s")
        wait_until(self.all_known, STUCK_S, "every registry knows all brokers again")
        self.sender.check()
        return seconds

    def stderr(self, size: int = 2000) -> str:
        """The ends of what the brokers have written to standard error."""
        return "\n".join(f"{broker.data.name}:\n{broker.stderr()[-size:]}" for broker in self.brokers)

    def finish(self) -> None:
        """Stop the producer: every broker has what it has acknowledged, in its order."""
        self.sender.check()
        self.sender.stop()
        for number, broker in zip(self._numbers, self.brokers, strict=True):
            wanted = set(self.sender.acknowledged[f"b{number}"])
            with TextClient(broker.host, broker.port) as text:
                found = {message.body for partition in (0, 1) for message in text.iterate(TOPIC, partition=partition)}
            expect(wanted <= found, f"{len(wanted - found)} that were acknowledged are lost", broker.data)
            expect("Traceback" not in broker.stderr(), "no surprises", broker.stderr()[-3000:])
            expect(broker.terminate() == 0, "an orderly stop", broker.log)


def _session(look: KazooClient, number: int) -> int | None:
    paths = (
        LAYOUT.replica(Replica(number, None)),
        LAYOUT.topic(TOPICS_TO_SUBSCRIBE, TOPIC, Replica(number, None)),
        RegisteredReplica("DefaultCluster", f"b{number}", 1).path,
    )
    try:
        owners = {look.get(path)[1].owner_session_id for path in paths}
    except NoNodeError:
        return None
    return owners.pop() if len(owners) == 1 else None
