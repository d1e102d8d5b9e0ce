"""What a client of an earlier version does with a broker: python fill.py REGISTRY ADDRESS DELAY_MS LEVEL

A program of its own, which imports the earlier ``metaq`` that is on its path, and nothing of these tests. It stores messages of
all kinds, and leaves work undone: messages wait for DELAY_MS or for the delay of LEVEL, are leased for DELAY_MS, or are
undecided. It prints where its ``metaq`` is, and what a later version must find, as JSON.
"""

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import metaq
from metaq.client import xa

LATER = datetime(2100, 1, 1, tzinfo=UTC)


def messages(client: metaq.Client, text: metaq.TextClient) -> dict[str, Any]:
    """Messages of both protocols, and a group that has consumed some."""
    text.create("orders", 2)
    for number in range(40):
        text.put("orders", b"text %d" % number, partition=number % 2, attribute="even" if number % 2 == 0 else "odd")
    assert len(list(text.iterate("orders", partition=1))) == 20
    producer = client.producer("sellers")
    for number in range(40):
        producer.send("bills", b"bill %d" % number, tag=f"t{number % 3}", keys=f"k{number}", properties={"number": str(number)})
    producer.send_batch("bills", [b"bill 40", b"bill 41"])
    got = 0
    with client.consumer("bills", "billing", consume_from=metaq.ConsumeFrom.FIRST) as consumer:
        for _ in consumer:
            got += 1
            if got == 12:
                break
        consumer.commit()
    offsets = {str(queue.partition): offset for queue, offset in client.admin().offsets("billing", "bills").items()}
    return {"offsets": offsets}


def delayed(client: metaq.Client, text: metaq.TextClient, delay: timedelta, level: int) -> dict[str, Any]:
    """Messages for later: by level, soon, and in the year 2100; one that is cancelled, and one that comes every year."""
    text.create("reminders", 1)
    client.producer().send("reminders", b"by level", delay_level=level)
    text.put("reminders", b"soon", delay=delay)
    cancelled = text.put("reminders", b"cancelled", delay=delay)
    assert cancelled.handle is not None
    text.cancel(cancelled.handle)
    later = client.producer().send("reminders", b"later", deliver_at=LATER)
    admin = client.admin()
    (broker,) = admin.masters()
    admin.timers().define(broker.address, "yearly", "0 0 1 1 *", "reminders", b"new year", missed="none")
    return {"handle": later.handle}


def leased(text: metaq.TextClient, delay: timedelta) -> dict[str, Any]:
    """Messages of a group that leases: one is done, one dead, one given back, one leased, and two were never given."""
    text.create("tasks", 1)
    for number in range(6):
        text.put("tasks", b"task %d" % number)
    first, second, third, fourth = text.pop("tasks", "workers", 4, invisible=max(delay, timedelta(seconds=1)))
    text.ack("tasks", "workers", [first.id])
    text.reject("tasks", "workers", [second.id])
    text.nack("tasks", "workers", [third.id], delay=delay)
    return {"attempts": {third.body.decode(): 2, fourth.body.decode(): 2, "task 4": 1, "task 5": 1}}


def undecided(client: metaq.Client, address: str) -> dict[str, Any]:
    """A prepared branch, and a half message whose producer does not know its outcome."""
    with xa.connect(address, qualifier="shop") as session:
        xid = session.xid(1, b"global", b"branch")
        session.tpc_begin(xid)
        session.send("orders", b"in a branch")
        session.tpc_prepare()
    unknown = metaq.Outcome.UNKNOWN
    producer = client.transaction_producer("deciders", lambda half, argument: unknown, check=lambda half: unknown)
    producer.send("bills", b"half")
    producer.close()
    return {}


def main(registry: str, address: str, delay_ms: str, level: str) -> None:
    delay = timedelta(milliseconds=int(delay_ms))
    host, _, port = address.rpartition(":")
    with metaq.connect(registry) as client, metaq.TextClient(host, int(port)) as text:
        left = {
            **messages(client, text),
            **delayed(client, text, delay, int(level)),
            **leased(text, delay),
            **undecided(client, address),
        }
    print(json.dumps({"file": metaq.__file__, **left}))


if __name__ == "__main__":
    main(*sys.argv[1:])
