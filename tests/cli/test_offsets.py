"""``metaq offsets export``: files of offsets, now and from the history, of one broker and of several."""

import builtins
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from metaq.protocol.remoting.offsetrows import OffsetRow, decode_lines
from tests.support.admin import connect, create_topic, send
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until
from tests.support.cli import Cli
from tests.support.consumer import Consumer

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BrokerProcess]]:
    """Two with one registry, and a group that consumes from both; the second one keeps a history."""
    folder = tmp_path_factory.mktemp("offsets")
    with RegistryProcess(folder / "registry") as registry, ExitStack() as stack:
        some = []
        for number, interval in ((0, "0"), (1, "100")):
            flags = ("--registries", registry.address, "--broker-name", f"b{number}", "--offset-export-interval-ms", interval)
            some.append(stack.enter_context(BrokerProcess(folder / f"data{number}", *flags)))
            with connect(some[-1]) as admin, Consumer(some[-1], "billing") as consumer:
                create_topic(admin, "orders")
                send(admin, "orders", b"a", b"b", b"c")
                consumer.commit("orders", 1 + number)
            some[-1].registry = registry.address
        yield some
    shutil.rmtree(folder)


@pytest.fixture
def cli(brokers: list[BrokerProcess]) -> Cli:
    return Cli(brokers[0].registry)


def of_billing(rows: list[OffsetRow]) -> list[tuple[str, int, int | None]]:
    return [(row.broker, row.partition, row.consumed) for row in rows if row.group == "billing" and row.topic == "orders"]


def test_json_lines(cli: Cli, tmp_path: Path) -> None:
    """SG-055, E-04: of all masters, into a file or to standard output."""
    file = tmp_path / "now.jsonl"
    done = cli.text("offsets", "export", "--out", str(file))
    found = decode_lines(file.read_bytes())
    assert of_billing(found) == [("b0", 0, 1), ("b1", 0, 2)]
    assert done == f"exported {len(found)} rows to {file}\n"
    assert cli.row("offsets", "export", "--out", str(file)) == {"file": str(file), "rows": len(found), "problems": []}
    assert of_billing(decode_lines(cli.text("offsets", "export", "--out", "-").encode())) == of_billing(found)
    assert list(tmp_path.iterdir()) == [file]


def test_parquet(cli: Cli, tmp_path: Path) -> None:
    """SG-055, E-04: the same rows, with types: times in microseconds, UTC."""
    lines, file = tmp_path / "now.jsonl", tmp_path / "now.parquet"
    cli.run("offsets", "export", "--out", str(lines))
    cli.run("offsets", "export", "--out", str(file), "--format", "parquet")
    table = pq.read_table(file)
    assert table.column_names == list(OffsetRow._fields)
    assert {table.schema.field(name).type for name in ("ts", "consumed_ts", "minimum_ts")} == {pa.timestamp("us", "UTC")}
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    for found, expected in zip(table.to_pylist(), rows, strict=True):
        for name in ("ts", "consumed_ts", "minimum_ts", "maximum_ts"):
            if expected[name] is not None:
                expected[name] = datetime.fromisoformat(expected[name])
        assert {**found, "ts": 0} == {**expected, "ts": 0}
        assert found["ts"] >= expected["ts"]


def test_from_the_history(cli: Cli, tmp_path: Path) -> None:
    """SG-067, E-04: what was recorded, by time; of the brokers that record."""
    file = tmp_path / "week.parquet"

    def times() -> list[datetime]:
        cli.run("offsets", "export", "--format", "parquet", "--out", str(file), "--from", "1h")
        return sorted(set(pq.read_table(file)["ts"].to_pylist()))

    wait_until(lambda: len(times()) >= 3, DEADLINE_S, "three records")
    assert {row["broker"] for row in pq.read_table(file).to_pylist()} == {"b1"}
    second = times()[1]
    between = [str(round(time.timestamp() * 1000)) for time in (second, times()[2])]
    rows = decode_lines(cli.text("offsets", "export", "--out", "-", "--from", between[0], "--to", between[1]).encode())
    assert {row.ts for row in rows} == {round(second.timestamp() * 1000)}


def test_what_cannot_be_exported(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-04: each with its reason, and no file."""
    file = str(tmp_path / "x.parquet")
    assert "--to needs --from" in cli.run("offsets", "export", "--out", file, "--to", "now", code=2).stderr
    assert "needs a file" in cli.run("offsets", "export", "--out", "-", "--format", "parquet", code=2).stderr
    nowhere = str(tmp_path / "no" / "x.jsonl")
    assert f"cannot write {nowhere}" in cli.run("offsets", "export", "--out", nowhere, code=2).stderr
    assert "--out" in cli.run("offsets", "export", code=2).stderr
    below = tmp_path / "file" / "x.jsonl"
    below.parent.touch()
    assert f"cannot write {below}: Not a directory" in cli.run("offsets", "export", "--out", str(below), code=2).stderr
    below.parent.unlink()
    for nameless in ("", ".", "/"):
        wrong = f"--out is {nameless!r}, which is not the name of a file"
        assert wrong in cli.run("offsets", "export", "--out", nameless, code=2).stderr
    Cli("127.0.0.1:1").run("offsets", "export", "--out", file, code=3)
    real = builtins.__import__

    def without_pyarrow(name: str, *rest: Any, **more: Any) -> Any:
        if name == "metaq.spark.report.offsetfile":
            raise ImportError("No module named 'pyarrow'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    missing = cli.run("offsets", "export", "--out", file, "--format", "parquet", code=2).stderr
    assert "pip install 'metaq-broker[spark]'" in missing and "--format jsonl" in missing
    assert not list(tmp_path.iterdir())
