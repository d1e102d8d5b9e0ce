"""Clients that outlive their broker, and programs patched by gevent."""

import logging
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from metaq.client import ConsumeFrom, Outcome, connect
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


def test_a_restart_within_the_time_of_a_send_fails_no_send(process: BrokerProcess) -> None:
    """SG-134: tries are spread over the time, whichever way a message is sent, also to a topic whose route is not known."""
    with connect(process.registry, timeout_s=DEADLINE_S) as client:
        producer = client.producer()
        transactions = client.transaction_producer("desk", lambda *given: Outcome.COMMIT, check=lambda half: Outcome.COMMIT)
        stop = threading.Event()

        def one_by_one(sent: list[str]) -> None:
            while not stop.is_set():
                sent.append(producer.send("orders", b"x").id)

        def keyed(sent: list[str]) -> None:
            while not stop.is_set():
                sent.append(producer.send("orders", b"x", ordering_key="k").id)

        def beside(sent: list[str]) -> None:
            while not stop.is_set():
                sent += [future.result().id for future in [producer.send_async("orders", b"x") for _ in range(20)]]

        def in_batches(sent: list[str]) -> None:
            while not stop.is_set():
                sent += [result.id for result in producer.send_batch("orders", [b"x", b"y"])]

        def in_transactions(sent: list[str]) -> None:
            while not stop.is_set():
                sent.append(transactions.send("orders", b"x").sent.id)

        ways = (one_by_one, keyed, beside, in_batches, in_transactions)
        sent: list[list[str]] = [[] for _ in ways]
        with ThreadPoolExecutor(len(ways) + 1) as threads:
            sending = [threads.submit(way, ids) for way, ids in zip(ways, sent, strict=True)]
            for ids in sent:
                wait_for_more(ids)
            process.kill()
            new = threads.submit(producer.send, "invoices", b"x")
            time.sleep(1.5)  # three times as long as three tries took before they were given up
            process.restart(same_port=True)
            for ids in sent:
                wait_for_more(ids)
            stop.set()
            new.result()
            for each in sending:
                each.result()
    assert all(len(set(ids)) == len(ids) for ids in sent)


def test_consumers_say_once_that_a_broker_goes_and_once_that_it_is_back(
    process: BrokerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """P31, SG-092: however many partitions, consumers and kinds of requests meet it."""
    topics = ["orders", "invoices"]
    with connect(process.registry, timeout_s=DEADLINE_S) as client, ExitStack() as consumers:
        for topic in topics:
            client.admin().create_topic(topic, 8)
        heards = [Heard() for _ in topics]
        first = ConsumeFrom.FIRST
        for topic, heard, ordered in zip(topics, heards, (False, True), strict=True):
            consumers.enter_context(client.listen(topic, f"of-{topic}", heard, ordered=ordered, consume_from=first))
        iterated = consumers.enter_context(client.consumer("orders", "iterated", consume_from=first, auto_commit=True))

        def exchange(body: bytes) -> None:
            for topic, heard in zip(topics, heards, strict=True):
                producer.send(topic, body)
                wait_until(lambda heard=heard: body in heard.bodies, DEADLINE_S, f"{topic} is heard")  # type: ignore[misc]
            message = iterated.receive(DEADLINE_S)
            assert message is not None
            assert message.body == body

        producer = client.producer()
        exchange(b"before")
        with caplog.at_level(logging.INFO, "metaq"):
            process.kill()
            time.sleep(3.0)  # pulls and members are asked for again several times by then
            process.restart(same_port=True)
            exchange(b"after")
    loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(loud) == 2, loud
    where = f"broker=metaq address={process.host}:{process.port}"
    assert loud[0].startswith(f"broker lost {where} reason=")
    assert re.fullmatch(rf"broker back {where} away_s=[\d.]+", loud[1])


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
