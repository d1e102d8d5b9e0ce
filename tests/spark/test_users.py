"""Spark and brokers that have users and use TLS: who may read, who may write, and no password is shown."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from pyspark.errors import PySparkException

import metaq
from metaq.errors import ConfigError
from metaq.message import HISTORY_TOPIC
from metaq.protocol.remoting.offsetrows import Kind
from metaq.spark.login import Login
from metaq.spark.reading.groups import GroupOffsets
from metaq.spark.reading.options import read_options
from metaq.spark.source import MetaqDataSource
from tests.spark.topics import run_now
from tests.support.broker import BrokerProcess, wait_until
from tests.support.tls import Certificates, issue
from tests.support.users import write_users

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DEADLINE_S: Final = 300.0
USER: Final = "spark"
SECRET: Final = "spark-secret-8c1d"
ADMIN_SECRET: Final = "admin-secret-77aa"
USERS: Final = f"""\
users:
  admin: {{secret: {ADMIN_SECRET}, admin: true}}
  {USER}: {{secret: {SECRET}, topics: {{in: SUB, out: PUB|SUB, copies: PUB}}, groups: {{watched: SUB}}}}
"""
COUNT: Final = 30
# Its password is in the environment only, until the session is made.
PROGRAM: Final = """\
import os, sys
from metaq.spark.session import session

settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
spark = session("login", master="local[1]", settings=settings)
del os.environ["METAQ_PASSWORD"]
servers, user, ca, checkpoint = sys.argv[1:]
options = {"metaq.bootstrap.servers": servers, "metaq.user": user, "metaq.tls.ca": ca}
frame = spark.read.format("metaq").options(**options, subscribe="in").load().select("value")
frame.write.format("metaq").options(**options, topic="copies").mode("append").save()
stream = spark.readStream.format("metaq").options(**options, subscribe="in", startingOffsets="earliest").load().select("value")
writer = stream.writeStream.format("metaq").options(**options, topic="copies", checkpointLocation=checkpoint)
writer.trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return issue(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("broker")
    users = write_users(folder / "users.yaml", USERS)
    flags = ("--users-file", str(users), *certificates.flags, "--offset-export-interval-ms", "500")
    with BrokerProcess(folder / "data", *flags) as process:
        with as_admin(process) as client:
            client.admin().create_topic("in", 2)
            client.admin().create_topic("out", 2)
            client.admin().create_topic("copies", 1)
            client.producer().send_batch("in", [b"%d" % number for number in range(COUNT)])
        yield process


def as_admin(broker: BrokerProcess) -> metaq.Client:
    return metaq.connect(broker.registry, user="admin", password=ADMIN_SECRET, timeout_s=60.0)


@pytest.fixture
def options(broker: BrokerProcess, certificates: Certificates) -> dict[str, str]:
    who = {"metaq.user": USER, "metaq.password": SECRET, "metaq.tls.ca": str(certificates.authority)}
    return {"metaq.bootstrap.servers": broker.registry, **who}


def read(spark: "SparkSession", options: dict[str, str], topic: str) -> "DataFrame":
    return spark.read.format("metaq").options(**options, subscribe=topic).load()


def numbers(frame: "DataFrame") -> list[int]:
    return sorted(int(bytes(row.value)) for row in frame.select("value").collect())


@pytest.mark.slow
@pytest.mark.partner("java")
@pytest.mark.timeout(900)
def test_a_user_reads_and_writes_over_tls(
    spark: "SparkSession", options: dict[str, str], tmp_path: Path, broker: BrokerProcess, certificates: Certificates
) -> None:
    """P47, E-05: in batches and as a stream, and commits offsets of a group; the password is in no plan and no progress."""
    frame = read(spark, options, "in")
    assert numbers(frame) == list(range(COUNT))
    frame.select("key", "value").write.format("metaq").options(**options, topic="out").mode("append").save()
    stream = spark.readStream.format("metaq").options(**options, subscribe="in", startingOffsets="earliest", groupId="watched")
    copied = stream.load().select("key", "value")
    writer = copied.writeStream.format("metaq").options(**options, topic="out", checkpointLocation=str(tmp_path / "state"))
    query = run_now(writer.trigger(availableNow=True).start)
    assert numbers(read(spark, options, "out")) == sorted([*range(COUNT)] * 2)
    shown = [json.dumps([progress.json for progress in query.recentProgress])]
    for plan in (frame, copied):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            plan.explain("extended")
            plan.explain("formatted")
        shown.append(printed.getvalue())
    assert all(shown) and "metaq" in shown[1]
    shown += [path.read_text(errors="replace") for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert not [text for text in shown if SECRET in text]


@pytest.mark.slow
@pytest.mark.partner("java")
@pytest.mark.timeout(900)
def test_who_may_not_is_told_without_the_password(spark: "SparkSession", options: dict[str, str]) -> None:
    """P47, E-05: a wrong secret, and a topic that is not granted; on a worker, too."""
    wrong = {**options, "metaq.password": "wrong-secret-31f0"}
    for given, topic, words in ((wrong, "in", "wrong signature"), (options, HISTORY_TOPIC, "may not")):
        with pytest.raises(PySparkException, match=words) as failed:
            read(spark, given, topic).collect()
        assert given["metaq.password"] not in str(failed.value)
    rows = spark.createDataFrame([("x",)], "value string")
    with pytest.raises(PySparkException, match="may not") as failed:
        rows.write.format("metaq").options(**options, topic="in").mode("append").save()
    assert SECRET not in str(failed.value)


@pytest.mark.slow
@pytest.mark.partner("java")
@pytest.mark.timeout(900)
def test_workers_need_no_password_in_their_environment(
    broker: BrokerProcess, certificates: Certificates, tmp_path: Path
) -> None:
    """P47, E-05: the driver's, when the session is made, is handed on to all reads and writes."""
    arguments = (broker.registry, USER, str(certificates.authority), str(tmp_path / "state"))
    environment = {**os.environ, "METAQ_PASSWORD": SECRET, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    with as_admin(broker) as client:
        assert sum(view.end for view in client.admin().queues("copies")) == 2 * COUNT
    state = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert not [data for data in (*state, done.stdout.encode(), done.stderr.encode()) if SECRET.encode() in data]


@pytest.mark.slow
def test_a_listener_commits_as_a_user(
    broker: BrokerProcess, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P47, E-05: its password is in the environment of the driver."""
    monkeypatch.delenv("METAQ_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match=r"metaq\.user: there is no password; .* METAQ_PASSWORD"):
        GroupOffsets(broker.registry, "watched", user=USER)
    monkeypatch.setenv("METAQ_PASSWORD", SECRET)
    listener = GroupOffsets(broker.registry, "watched", user=USER, tls_ca=str(certificates.authority))
    listener._commit(json.dumps({"in": {"0": 7}, "#queues": {"in": [["metaq", 0, 2]]}}))
    with as_admin(broker) as client:
        rows = [row for page in client.admin().offset_export().pages(broker.address) for row in page.rows]
    assert [(row.topic, row.partition, row.consumed) for row in rows if row.group == "watched" and row.partition == 0] == [
        ("in", 0, 7)
    ]
    listener._brokers.close()


def cli(broker: BrokerProcess, certificates: Certificates, *arguments: str, secret: str) -> subprocess.CompletedProcess[str]:
    """A command as the administrator; its password is in the environment."""
    access = ("--user", "admin", "--tls-ca", str(certificates.authority))
    command = [sys.executable, "-m", "metaq", *access, *arguments, "--registry", broker.registry]
    environment = {**os.environ, "METAQ_PASSWORD": secret, "SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def recorded(broker: BrokerProcess) -> bool:
    """Return whether the broker has recorded the offsets of the group."""
    with as_admin(broker) as client:
        return any(view.end > 1 for view in client.admin().queues(HISTORY_TOPIC))


@pytest.mark.slow
@pytest.mark.partner("java")
@pytest.mark.timeout(900)
def test_offsets_are_exported_and_reported_as_a_user(broker: BrokerProcess, certificates: Certificates, tmp_path: Path) -> None:
    """P18, E-05: the commands hand on who they are, and no argument has the password."""
    with as_admin(broker) as client, client.pull_consumer("in", "watched") as consumer:
        consumer.commit(dict.fromkeys(consumer.partitions(), 3))
    wait_until(lambda: recorded(broker), DEADLINE_S, "samples are recorded")
    lines = tmp_path / "now.jsonl"
    done = cli(broker, certificates, "offsets", "export", "--out", str(lines), secret=ADMIN_SECRET)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {row["group"] for row in rows if row["kind"] != Kind.TOPIC} == {"watched"}
    refused = cli(broker, certificates, "offsets", "report", "--out", str(tmp_path / "no"), secret="wrong-secret-31f0")
    assert refused.returncode != 0 and "wrong signature" in refused.stderr and "wrong-secret" not in refused.stderr
    done = cli(broker, certificates, "offsets", "report", "--out", str(tmp_path / "out"), secret=ADMIN_SECRET)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists()


# -- without brokers --------------------------------------------------------------------------------------------------


def test_the_password_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """P47: of the driver, where the source is made; what the options say comes first, and who names no user has none."""
    base = {"metaq.bootstrap.servers": "h:1", "subscribe": "t"}
    monkeypatch.setenv("METAQ_PASSWORD", "of the environment")

    def login(**options: str) -> Login:
        return read_options(MetaqDataSource({**base, **options}).options).login

    assert login(**{"metaq.user": "a"}) == Login("a", "of the environment")
    assert login(**{"metaq.user": "a", "metaq.password": " blanks count "}).password == " blanks count "
    assert login() == Login()
    assert "of the environment" not in repr(read_options({**base, "metaq.user": "a", "metaq.password": "of the environment"}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metaq.user": "a"}, "metaq.user: there is no password; set metaq.password, or METAQ_PASSWORD"),
        ({"metaq.password": "hidden-5e"}, "metaq.password: there is no metaq.user"),
        (
            {"metaq.bootstrap.servers": "metaq://a:hidden-5e@h:1/"},
            "metaq.bootstrap.servers: the address has a user or a password",
        ),
        ({"metaq.bootstrap.servers": "metaq://h:1/?tls=ca.pem"}, "metaq.bootstrap.servers: use metaq.tls.ca instead"),
        (
            {"metaq.bootstrap.servers": "", "path": "p", "metaq.user": "a", "metaq.password": "hidden-5e"},
            "path: a store folder",
        ),
        ({"metaq.pasword": "hidden-5e"}, "the option metaq.pasword is unknown; did you mean metaq.password?"),
    ],
)
def test_wrong_logins_are_named(options: dict[str, str], words: str) -> None:
    """P47, E-05: without what they hold."""
    with pytest.raises(ConfigError) as failed:
        read_options({"metaq.bootstrap.servers": "h:1", "subscribe": "t", **options})
    assert words in str(failed.value) and "hidden-5e" not in str(failed.value)
