"""The report kept current by a stream of a real broker's history: the start of a problem is an alarm, and so is its end."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from metaq.client import Client, connect
from metaq.message import HISTORY_TOPIC
from metaq.spark.report import alarms
from metaq.spark.report.alarms import ENDED, RAISED, Watch, follow, raise_alarms
from metaq.spark.report.findings import OffsetFinding
from metaq.spark.report.report import PAGE, TOLD, Job, history_of, report
from tests.spark.topics import run_until
from tests.support.admin import connect as admin_connect
from tests.support.admin import create_topic, send
from tests.support.broker import BrokerProcess, wait_until
from tests.support.consumer import Consumer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.partner("java"), pytest.mark.timeout(1500)]

DEADLINE_S: Final = 600.0
ALARMS: Final = "alarms"
KEY: Final = "unowned/billing/orders/"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """It records the history ten times a second; a group has consumed two of three messages, and nobody of it is there."""
    with BrokerProcess(tmp_path / "data", "--offset-export-interval-ms", "100") as process:
        with admin_connect(process) as admin, Consumer(process, "billing") as consumer:
            for topic in ("orders", ALARMS):
                create_topic(admin, topic)
            send(admin, "orders", b"a", b"b", b"c")
            consumer.commit("orders", 2)
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with connect(broker.registry, timeout_s=60) as client:
        yield client


def sent(client: Client) -> list[tuple[str | None, dict[str, object]]]:
    """Tag and body of the alarms of the group; a broker that is slow to record is another one."""
    admin = client.admin()
    messages = [message for queue in admin.queues(ALARMS) for message in admin.read(queue.queue, queue.begin, queue.end)]
    return [(message.tag, json.loads(message.body)) for message in messages if message.keys == (KEY,)]


def recorded(client: Client) -> int:
    """Samples of the history."""
    return sum(queue.end - queue.begin for queue in client.admin().queues(HISTORY_TOPIC))


def watch_of(broker: BrokerProcess, out: Path) -> Watch:
    return Watch(out=str(out), servers=broker.registry, topic=HISTORY_TOPIC, alarms=ALARMS, every_s=1.0, stuck_samples=5)


def follow_until(spark: "SparkSession", watch: Watch, client: Client, *, raised: bool) -> None:
    """Follow until the alarm is noted, behind its message; a query that failed says why."""
    notes = Path(watch.out) / "alarms.json"

    def noted() -> bool:
        return notes.exists() and (KEY in json.loads(notes.read_bytes())) == raised

    run_until(lambda: follow(spark, watch, client.producer()), noted, f"an alarm noted as raised={raised}", DEADLINE_S)


@pytest.mark.slow
def test_a_report_of_what_a_broker_recorded(
    spark: "SparkSession", broker: BrokerProcess, client: Client, tmp_path: Path
) -> None:
    """MQ-116: the system topic is read through the data source."""
    wait_until(lambda: recorded(client) > 20, DEADLINE_S, "20 samples")
    job = Job(out=str(tmp_path / "out"), servers=broker.registry, topic=HISTORY_TOPIC, stuck_samples=5)
    findings = report(history_of(spark, job), job)
    (found,) = (one for one in findings if one.kind != "gap")
    assert (found.key, found.lag) == (KEY, 1)
    assert found.sentence.startswith("billing has had no consumer of orders since ")


@pytest.mark.slow
def test_alarms_come_and_end(spark: "SparkSession", broker: BrokerProcess, client: Client, tmp_path: Path) -> None:
    """MQ-116: once each, also over a restart; the page is there meanwhile."""
    out = tmp_path / "out"
    watch = watch_of(broker, out)
    follow_until(spark, watch, client, raised=True)
    with Consumer(broker, "billing") as consumer:
        consumer.commit("orders", 3)
    follow_until(spark, watch, client, raised=False)
    assert [tag for tag, _ in sent(client)] == [RAISED, ENDED]
    for tag, body in sent(client):
        assert (body["state"], body["kind"], body["group"], body["lag"]) == (tag, "unowned", "billing", 1)
    assert "<h1>Offset report</h1>" in (out / PAGE).read_text("utf-8")


def test_an_alarm_that_was_not_noted_is_sent_again(broker: BrokerProcess, tmp_path: Path) -> None:
    """MQ-116: with the same key, so that a reader can tell."""
    topic = "again"
    finding = OffsetFinding("problem", "stuck", "g", "t", ["b/0"], "It is stuck.", "Look.", None, 3, None, None)
    with admin_connect(broker) as admin:
        create_topic(admin, topic)
    watch = watch_of(broker, tmp_path)._replace(alarms=topic)
    with connect(broker.registry, timeout_s=60) as client:
        producer = client.producer()
        for findings in ([finding], [finding]):
            raise_alarms(watch, findings, producer)
        (tmp_path / "alarms.json").unlink()
        raise_alarms(watch, [finding], producer)
        reader = client.admin()
        found = [
            (message.tag, message.keys) for queue in reader.queues(topic) for message in reader.read(queue.queue, 0, queue.end)
        ]
    assert found == [(RAISED, ("stuck/g/t/",))] * 2


def test_an_alarm_about_any_group_can_be_sent(broker: BrokerProcess, tmp_path: Path) -> None:
    r"""MQ-116: a group that only reads by ``get`` may have a name that no key may have; different names stay different."""
    names = ["a\x01b", "a\tb", "a\u2028b", r"a\u0001b", "数/%g%"]
    findings = [OffsetFinding("problem", "stuck", name, "t", ["b/0"], "", "", None, 3, None, None) for name in names]
    with connect(broker.registry, timeout_s=60) as client:
        raise_alarms(watch_of(broker, tmp_path), findings, client.producer())
        admin = client.admin()
        found = {
            message.keys: json.loads(message.body)["group"]
            for queue in admin.queues(ALARMS)
            for message in admin.read(queue.queue, 0, queue.end)
        }
    keys = [r"a\u0001b", r"a\u0009b", r"a\u2028b", r"a\u005cu0001b", "数/%g%"]
    assert found == {(f"stuck/{key}/t/",): name for key, name in zip(keys, names, strict=True)}


def test_it_is_a_program_of_its_own(tmp_path: Path) -> None:
    """MQ-116: started with the job as one argument; brokers that are not there are one line."""
    watch = json.dumps(Watch(out=str(tmp_path), servers="127.0.0.1:1", topic=HISTORY_TOPIC)._asdict())
    command = [sys.executable, "-m", alarms.__name__, watch]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (TOLD, 1)
    assert "no registry answers" in done.stderr
