"""Clients outlive their broker; programs that gevent patched."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from metaq.client import ConsumeFrom, connect
from metaq.errors import ClientError
from tests.client.test_consumers import Heard
from tests.support.broker import BrokerProcess, wait_until

DEADLINE_S = 120.0


def wait_for_more(sent: list[str]) -> None:
    before = len(sent)
    wait_until(lambda: len(sent) > before + 50, DEADLINE_S, "sends go on")


@pytest.mark.parametrize("ordered", [False, True])
def test_a_broker_is_killed_and_comes_back(process: BrokerProcess, ordered: bool) -> None:
    """SG-135, SG-116: nothing that was acknowledged is lost, and no client is started again."""
    sent: list[str] = []
    stop = threading.Event()
    heard = Heard()
    with connect(process.registry, timeout_s=5.0) as client, connect(process.registry) as consuming:
        producer = client.producer()
        producer.send("orders", b"the topic exists")

        def produce() -> None:
            while not stop.is_set():
                try:
                    sent.append(producer.send("orders", str(len(sent)).encode()).id)
                except ClientError:
                    time.sleep(0.02)  # it may be stored or not; who sends it again may have it twice
                time.sleep(0.001)

        producing = threading.Thread(target=produce)
        with consuming.listen("orders", "billing", heard, ordered=ordered, consume_from=ConsumeFrom.FIRST):
            producing.start()
            for _ in range(2):
                wait_for_more(sent)
                process.restart(same_port=True)
            wait_for_more(sent)
            stop.set()
            producing.join()
            wait_until(lambda: {message.id for message in heard.messages} >= set(sent), DEADLINE_S, "every message is heard")


def test_a_program_that_gevent_patched(process: BrokerProcess) -> None:
    """P45: the same client among greenlets; nothing of it blocks the others."""
    program = textwrap.dedent(
        """
        from gevent import monkey
        monkey.patch_all()
        import sys, gevent, metaq

        ticks = []
        def tick():
            while True:
                ticks.append(1)
                gevent.sleep(0.01)

        gevent.spawn(tick)
        with metaq.connect(sys.argv[1]) as client:
            producer = client.producer()
            producer.send("orders", b"the topic exists")
            jobs = [gevent.spawn(producer.send, "orders", str(n).encode()) for n in range(20)]
            gevent.joinall(jobs, raise_error=True)
            with client.consumer("orders", "billing", consume_from=metaq.ConsumeFrom.FIRST) as consumer:
                found = [consumer.receive(timeout_s=30).body for _ in range(21)]
                waiting = gevent.spawn(consumer.receive, timeout_s=30)
                before = len(ticks)
                while len(ticks) < before + 5:
                    gevent.sleep(0.01)
                assert not waiting.ready(), "it waits, and greenlets go on"
                waiting.kill()
                assert consumer.receive(timeout_s=0.1) is None
                consumer.commit()
            heard = []
            with client.listen("orders", "shipping", heard.append, consume_from=metaq.ConsumeFrom.FIRST):
                while len(heard) < 21:
                    gevent.sleep(0.01)
        assert sorted(found) == sorted(message.body for message in heard)
        print(len(found))
        """
    )
    command = [sys.executable, "-c", program, process.registry]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "21\n"), done.stderr


def test_the_client_brings_neither_gevent_nor_the_broker() -> None:
    """P42, P20: importing it is light, and patches nothing."""
    program = (
        "import sys, metaq; early = {'metaq.client', 'orjson'} & set(sys.modules); "
        "metaq.connect; import metaq.aio, metaq.testing; "
        "print(sorted(early), sorted({'gevent', 'pydantic', 'yaml', 'metaq.server', 'metaq.store'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == "[] []\n"
