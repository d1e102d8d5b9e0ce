"""A broker that connections take all file descriptors from goes on when they are closed."""

import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from metaq.client import TextClient
from metaq.client.text.textclient import parse_stats
from metaq.errors import MetaqError
from tests.support import fewfiles
from tests.support.broker import BrokerProcess, wait_until
from tests.support.metrics import value

DEADLINE_S: Final = 60.0
DUTY: Final = "duty failed duty=_checkpoint"


class Few(BrokerProcess):
    """A broker that may open few files."""

    program = (fewfiles.__name__,)


def test_a_broker_may_open_what_its_machine_permits(tmp_path: Path) -> None:
    """SG-010: the soft limit is made the hard one."""
    with Few(tmp_path / "data") as broker:
        assert value(broker, "process_max_fds") == fewfiles.HARD


def test_without_descriptors_it_waits_and_loses_nothing(tmp_path: Path) -> None:
    """SG-010: what it acknowledges meanwhile is there, and afterwards it takes messages again without a restart."""
    flags = ("--max-open-files", "8", "--checkpoint-interval-ms", "20", "--sweep-interval-ms", "20")
    kept: list[str] = []
    with Few(tmp_path / "data", *flags, durability="disk") as broker, TextClient(broker.host, broker.port) as client:
        with ExitStack() as connections:
            for _ in range(fewfiles.HARD):
                connections.enter_context(socket.create_connection((broker.host, broker.port)))
            wait_until(lambda: "cannot accept, pausing" in broker.stderr(), DEADLINE_S, "no descriptor is left")
            number = 0

            def fails() -> bool:
                nonlocal number
                number += 1
                with suppress(MetaqError):
                    client.put(f"t{number % 40}", b"%d" % number)
                    kept.append(str(number))
                return DUTY in broker.stderr()

            wait_until(fails, DEADLINE_S, "a checkpoint cannot be made")
        wait_until(lambda: "duty works again duty=_checkpoint" in broker.stderr(), DEADLINE_S, "it is made")
        assert parse_stats(client.stats())["writable"] == "yes"
        client.put("t0", b"last")
        broker.kill()
        broker.start()
        with TextClient(broker.host, broker.port) as again:
            found = [message.body.decode() for topic in range(40) for message in again.get(f"t{topic}").messages]
    assert sorted(found) == sorted([*kept, "last"])
