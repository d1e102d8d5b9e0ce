"""Programs that fork: clients that a child inherits work there, or say why not, and do not disturb the parent's.

Each program is a process of its own: a test that forks itself would copy what other tests have left.
"""

import json
import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any, Final

import pytest

from metaq.client import Client, connect
from metaq.client.xa import connect as connect_xa
from tests.support.broker import BrokerProcess

DEADLINE_S = 120.0
PRELUDE: Final = f"""
import gc, json, multiprocessing, os, signal, sys, threading, time, warnings
import metaq
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons advise against forks beside threads
signal.alarm({DEADLINE_S:.0f})  # a child that hangs ends, with an exit code that says so

def children(count, work):
    '''Fork, do the work in each child, and tell what it wrote and how it ended.'''
    made = []
    for number in range(count):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm({DEADLINE_S:.0f})
            try:
                with open(writing, "w") as results:
                    json.dump(work(number), results)
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        os.close(writing)
        made.append((pid, reading))
    return made

def results(made):
    found = []
    for pid, reading in made:
        with open(reading) as pipe:
            text = pipe.read()
        assert os.waitpid(pid, 0)[1] == 0, "a child has failed"
        found.append(json.loads(text))
    return found
"""


def run(program: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stored(client: Client, topic: str) -> Counter[str]:
    """How often each message is there, by id."""
    admin = client.admin()
    return Counter(message.id for view in admin.queues(topic) for message in admin.read(view.queue, view.begin, view.end))


def test_parent_and_children_send_at_the_same_time(process: BrokerProcess) -> None:
    """P45: all of one client and one producer, by both ways to send; ids are distinct, and each message is there once."""
    sent = run(
        """
        client = metaq.connect(sys.argv[1], timeout_s=60)
        producer = client.producer()
        producer.send("orders", b"the parent is connected")

        def work(number):
            ids = [producer.send("orders", b"%d" % n).id for n in range(200)]
            futures = [producer.send_async("orders", b"%d" % n) for n in range(200)]
            ids += [future.result(60).id for future in futures]
            ids += [result.id for result in client.producer("another").send_batch("orders", [b"a", b"b"])]
            client.close()
            return ids

        stop, own = threading.Event(), []
        def meanwhile():
            while not stop.is_set():
                own.append(producer.send("orders", b"beside").id)
        beside = [threading.Thread(target=meanwhile) for _ in range(4)]
        for thread in beside:
            thread.start()
        made = children(4, work)
        found = results(made)
        before = len(own)
        while len(own) < before + 100:
            time.sleep(0.01)
        stop.set()
        for thread in beside:
            thread.join()
        client.close()
        print(json.dumps([own, *found]))
        """,
        process.registry,
    )
    ids = [one for group in sent for one in group]
    assert [len(group) for group in sent[1:]] == [402] * 4
    assert len(set(ids)) == len(ids)
    with connect(process.registry) as client:
        found = stored(client, "orders")
    assert set(ids) < set(found)
    assert set(found.values()) == {1}
    assert len(found) == len(ids) + 1


EVERYTHING_HELD: Final = """
client = metaq.connect(sys.argv[1], timeout_s=60)
producer = client.producer()
producer.send("orders", b"1")
producer.send_async("orders", b"2").result(60)
lingering = client.producer(linger_ms=3_600_000)
lingering.send_async("orders", b"of the parent alone")
commits = lambda *given: metaq.Outcome.COMMIT
transactions = client.transaction_producer("box", commits, check=commits)
transactions.send("bookings", b"3")
host, _, port = sys.argv[2].rpartition(":")
text = metaq.TextClient(host, int(port), timeout_s=60)
text.put("orders", b"4")
session = client.xa_session("orders", qualifier="forks")
iterated = client.consumer("orders", "billing", consume_from=metaq.ConsumeFrom.FIRST)
assert iterated.receive(60) is not None
listened = client.listen("orders", "shipping", lambda message: None)
pulled = client.pull_consumer("orders")
pulled.assign(pulled.partitions())

kinds = (type(threading.Lock()), type(threading.RLock()))
held = {}
def hold():
    for thing in gc.get_objects():
        if type(thing).__module__.startswith("metaq."):
            for name, value in getattr(thing, "__dict__", {}).items():
                lock = getattr(value, "_lock", value)
                if isinstance(lock, kinds) and lock.acquire(timeout=10):
                    held[id(lock)] = (f"{type(thing).__name__}.{name}", lock)
    holding.set()
    let_go.wait()
    for _, lock in held.values():
        lock.release()
holding, let_go = threading.Event(), threading.Event()
holder = threading.Thread(target=hold)
holder.start()
holding.wait()

def work(number):
    producer.send("orders", b"5")
    producer.send_async("orders", b"6").result(60)
    sent = lingering.send_async("orders", b"lingers")
    lingering.close()
    assert sent.result(0)
    transactions.send("bookings", b"7")
    text.put("orders", b"8")
    with session:
        session.tpc_begin(session.xid(1, "child", "messages"))
        session.send("orders", b"9")
        session.tpc_commit()
    for consumer in (iterated, listened, pulled):
        consumer.close()
    with client.consumer("orders", "packing", consume_from=metaq.ConsumeFrom.FIRST) as consumer:
        assert consumer.receive(60) is not None
        consumer.commit()
    for one in (transactions, producer, text, client):
        one.close()
    return True

assert results(children(1, work)) == [True]
let_go.set()
holder.join()
producer.send("orders", b"10")
client.close()
print(json.dumps(sorted({name for name, _ in held.values()})))
"""


@pytest.mark.slow
def test_whatever_lock_another_thread_held_hangs_no_child(process: BrokerProcess) -> None:
    """P45: every lock that the client's objects have is held while the fork happens."""
    names = run(
        EVERYTHING_HELD,
        process.registry,
        f"{process.host}:{process.port}",
    )
    expected = {
        "Core._guard",
        "Links._guard",
        "LinkWriter._turn",
        "LinkReader._changed",
        "Scheduler._changed",
        "Routes._guard",
        "Checks._guard",
    }
    expected |= {"Producer._closing", "TransactionProducer._closing", "TextClient._connecting", "TextConnection._sending"}
    assert expected | {"XaSession._in_use", "SimpleConsumer._guard", "PushConsumer._guard", "Inbox._changed"} <= set(names)


def test_pools_of_multiprocessing(process: BrokerProcess) -> None:
    """P45: a client that a module makes when it is imported, as with `gunicorn --preload`, works in every worker."""
    sent = run(
        """
        client = metaq.connect(sys.argv[1], timeout_s=60)
        producer = client.producer()
        ids = [producer.send("orders", b"before").id]

        def work(number):
            return producer.send("orders", b"%d" % number).id

        with multiprocessing.get_context("fork").Pool(3) as pool:
            ids += pool.map(work, range(300), chunksize=5)
        ids.append(producer.send("orders", b"after").id)
        client.close()
        print(json.dumps(ids))
        """,
        process.registry,
    )
    with connect(process.registry) as client:
        assert stored(client, "orders") == Counter(sent)
    assert len(set(sent)) == 302


def test_consumers_belong_to_the_process_that_made_them(process: BrokerProcess) -> None:
    """P45: a child is told so at every use, its end disturbs nothing, and the parent gets every message once."""
    found = run(
        """
        client = metaq.connect(sys.argv[1], timeout_s=60, instance="desk")
        producer = client.producer()
        for number in range(20):
            producer.send("orders", b"%d" % number)
        first = metaq.ConsumeFrom.FIRST
        consumer = client.consumer("orders", "billing", consume_from=first)
        heard = []
        listening = client.listen("orders", "shipping", lambda message: heard.append(message.body), consume_from=first)
        reader = client.pull_consumer("orders")
        reader.assign(reader.partitions())
        leasing = client.lease_consumer("orders", "leasing", batch=32)
        leasing.receive(60).ack()
        iterator = iter(consumer)
        seen = [next(iterator).body.decode() for _ in range(5)]

        def work(number):
            one = next(iter(reader.partitions()))
            uses = {
                "receive": lambda: consumer.receive(1),
                "iterate": lambda: next(iterator),
                "commit": consumer.commit,
                "lease": lambda: leasing.receive(1),
                "run": lambda: leasing.run(print),
                "subscribe": lambda: listening.subscribe("invoices"),
                "poll": reader.poll,
                "seek": lambda: reader.seek(one, 0),
                "commit offsets": reader.commit,
            }
            told = {}
            for name, use in uses.items():
                try:
                    use()
                except metaq.ClientClosed as error:
                    told[name] = str(error)
            for one in (consumer, listening, reader, leasing, client):
                one.close()
            return told

        (told,) = results(children(1, work))
        while len(seen) < 20:
            seen.append(next(iterator).body.decode())
        consumer.commit()
        while len(heard) < 20:
            time.sleep(0.01)
        for _ in range(19):
            leasing.receive(60).ack()
        members = client.admin().members("billing")
        client.close()
        print(json.dumps([told, seen, [body.decode() for body in heard], len(members.members)]))
        """,
        process.registry,
    )
    told, seen, heard, members = found
    assert set(told) == {"receive", "iterate", "commit", "subscribe", "poll", "seek", "commit offsets", "lease", "run"}
    assert all("was made before this process was forked" in text for text in told.values())
    assert sorted(map(int, seen)) == sorted(map(int, heard)) == list(range(20))
    assert members == 1


def test_a_subscription_stays_with_the_parent(process: BrokerProcess) -> None:
    """P45: a child takes nothing off its connection, and closes nothing but its own descriptors."""
    told, body = run(
        """
        client = metaq.TextClient(sys.argv[1], int(sys.argv[2]))
        client.create("orders", 1)
        subscription = client.subscribe("orders", "billing")

        def work(number):
            try:
                subscription.receive(1)
            except metaq.ConnectionFailed as error:
                return str(error)
            finally:
                subscription.close()

        made = children(1, work)
        (told,) = results(made)
        client.put("orders", b"1")
        message = subscription.receive(60)
        message.ack()
        print(json.dumps([told, message.body.decode()]))
        """,
        process.host,
        str(process.port),
    )
    assert "it belongs to the process that this one was forked from" in told
    assert body == "1"


def test_a_branch_stays_with_the_parent(process: BrokerProcess) -> None:
    """SG-135: the child's session is in no branch, and its end rolls nothing back."""
    told = run(
        """
        import metaq.client.xa
        session = metaq.client.xa.connect(sys.argv[1], qualifier="forks")
        session.tpc_begin(session.xid(1, "order", "messages"))
        session.send("orders", b"of the parent")

        def work(number):
            try:
                session.send("orders", b"of the child")
            except metaq.ClientError as error:
                told = str(error)
            session.close()
            return told

        found = results(children(1, work))
        session.send("orders", b"of the parent, too")
        session.tpc_prepare()
        session.tpc_commit()
        session.close()
        print(json.dumps(found))
        """,
        f"{process.host}:{process.port}",
    )
    assert told == ["this session is in no branch; call tpc_begin first"]
    with connect_xa(f"{process.host}:{process.port}", qualifier="forks") as session:
        assert session.tpc_recover() == []
    with connect(process.registry) as client:
        assert sum(stored(client, "orders").values()) == 2


def test_asyncio_in_a_child(process: BrokerProcess) -> None:
    """P44, P45: a client of metaq.aio that was made before the fork gets threads of its own."""
    sent = run(
        """
        import asyncio
        import metaq.aio
        client = metaq.aio.connect(sys.argv[1], timeout_s=60)

        async def send():
            producer = client.producer()
            return [result.id for result in await asyncio.gather(*(producer.send("orders", b"x") for _ in range(50)))]

        ids = [asyncio.run(send())]
        made = children(2, lambda number: asyncio.run(send()))
        print(json.dumps(ids + [asyncio.run(send())] + results(made)))
        """,
        process.registry,
    )
    assert len({one for ids in sent for one in ids}) == 200


def test_a_program_that_gevent_patched_and_forks(process: BrokerProcess) -> None:
    """P45: as a server of workers does it."""
    sent = run(
        """
        from gevent import monkey
        monkey.patch_all()
        import gevent
        client = metaq.connect(sys.argv[1], timeout_s=60)
        producer = client.producer()
        ids = [[producer.send("orders", b"before").id]]

        def work(number):
            jobs = [gevent.spawn(producer.send, "orders", b"x") for _ in range(20)]
            gevent.joinall(jobs, raise_error=True)
            return [job.value.id for job in jobs]

        made = children(2, work)
        ids.append([producer.send("orders", b"after").id])
        print(json.dumps(ids + results(made)))
        """,
        process.registry,
    )
    assert len({one for ids in sent for one in ids}) == 42


@pytest.mark.parametrize("use", ["client.producer().send('t', b'x')", "client.admin().topics()"])
def test_a_broker_in_memory_is_in_one_process_only(use: str) -> None:
    """P45: its clients are told so in a child, which has a copy that nobody else sees."""
    (told,) = run(
        f"""
        import metaq.testing
        with metaq.testing.broker() as broker, metaq.connect(broker.address) as client:
            client.producer().send("t", b"before")

            def work(number):
                try:
                    {use}
                except metaq.MetaqError as error:
                    return str(error)

            print(json.dumps(results(children(1, work))))
        """
    )
    assert "belongs to one process" in told


def test_a_child_that_uses_nothing_starts_nothing(process: BrokerProcess) -> None:
    """P45: no thread and no connection before the first call; those of the parent are closed here and open there."""
    found = run(
        """
        client = metaq.connect(sys.argv[1], timeout_s=60)
        producer = client.producer()
        producer.send("orders", b"x")

        def sockets():
            places = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdecimal()
                      if os.path.islink(f"/proc/self/fd/{name}"))
            return sum(place.startswith("socket:") for place in places)

        def work(number):
            before = threading.active_count(), sockets()
            client.close()
            return [*before, sockets()]

        (told,) = results(children(1, work))
        open_in_parent = sockets()
        producer.send("orders", b"x")
        assert sockets() == open_in_parent
        print(json.dumps([told, open_in_parent > 0]))
        """,
        process.registry,
    )
    assert found == [[1, 0, 0], True]
