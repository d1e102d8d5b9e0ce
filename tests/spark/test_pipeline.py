"""The example of a pipeline, run as it stands, on a million messages and through a SIGKILL."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow.parquet as pq
import pytest

import metaq
from tests.docs.examples import ROOT
from tests.spark.dying import TOO_LATE, TRIES
from tests.support.broker import BrokerProcess, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.partner("java"), pytest.mark.timeout(1800)]

DEADLINE_S: Final = 800.0
MESSAGES: Final = 1_000_000
SHOPS: Final = 50
START_S: Final = 1_773_446_400
"""Of the first payment, in seconds since 1970; a full hour."""
SPAN_S: Final = 3600
JITTER_S: Final = 60
"""How far payments are out of order: less than the pipeline waits for late ones."""
SEGMENT_BYTES: Final = 256 * 1024 * 1024

Key = tuple[str, int]
"""Shop, and minute since 1970."""


def run(registry: str, folder: Path, killed: Callable[[], bool]) -> int:
    """Run the example to its end, or until it is to be ``killed`` with its JVM; its exit code."""
    command = [sys.executable, str(ROOT / "examples" / "pipeline.py"), registry, str(folder / "out"), "--once"]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    log = folder / "pipeline.stderr"
    for _ in range(TRIES):
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            wait_until(partial(is_over, process, killed), DEADLINE_S, f"the pipeline is done, see {log}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if TOO_LATE not in log.read_text():
            break
    assert code in {0, -signal.SIGKILL}, log.read_text()[-5000:]
    return code


def is_over(process: subprocess.Popen[bytes], killed: Callable[[], bool]) -> bool:
    return process.poll() is not None or killed()


def plant(spark: "SparkSession", registry: str) -> dict[Key, tuple[int, int]]:
    """Send a million payments, and one a day later that ends all minutes; payments and cents of each shop and minute."""
    tenths = f"{START_S * 10} + id * {SPAN_S * 10} div {MESSAGES} + id * 7919 % {JITTER_S * 10}"
    shop, cents, at = f"concat('s', id * 31 % {SHOPS})", "id * 104729 % 9973", f"timestamp_millis(({tenths}) * 100)"
    # one task: the pipeline waits for late payments, and two would write payments side by side that are half an hour apart
    rows = spark.range(MESSAGES).coalesce(1).selectExpr(f"to_json(struct({shop} shop, {cents} cents, {at} at)) value")
    rows.write.format("metaq").option("metaq.bootstrap.servers", registry).option("topic", "payments").mode("append").save()
    last = {"shop": "none", "cents": 0, "at": "2030-01-01T00:00:00Z"}
    with metaq.connect(registry) as client:
        client.producer().send("payments", json.dumps(last).encode())
    ids = np.arange(MESSAGES)
    minutes = START_S // 60 + (ids * SPAN_S * 10 // MESSAGES + ids * 7919 % (JITTER_S * 10)) // 600
    found, inverse = np.unique(ids * 31 % SHOPS * 1_000_000_000 + minutes, return_inverse=True)
    counts, sums = np.bincount(inverse), np.bincount(inverse, weights=ids * 104729 % 9973)
    return {
        (f"s{place // 1_000_000_000}", place % 1_000_000_000): (count, round(total))
        for place, count, total in zip(found.tolist(), counts.tolist(), sums.tolist(), strict=True)
    }


@pytest.mark.slow
def test_sums_are_exact(spark: "SparkSession", tmp_path: Path) -> None:
    """P47: of a million messages, although the pipeline is killed on its way: in Parquet each minute of each shop once."""
    with BrokerProcess(tmp_path / "data", "--segment-bytes", str(SEGMENT_BYTES)) as broker:
        with metaq.connect(broker.registry, timeout_s=60.0) as client:
            for topic, partitions in (("payments", 4), ("revenue", 1)):
                client.admin().create_topic(topic, partitions)
            expected = plant(spark, broker.registry)
            assert sum(queue.end for queue in client.admin().queues("payments")) == MESSAGES + 1
            assert sum(count for count, _ in expected.values()) == MESSAGES

            def written() -> int:
                return sum(queue.end for queue in client.admin().queues("revenue"))

            assert run(broker.registry, tmp_path, lambda: written() > 0) == -signal.SIGKILL
            assert run(broker.registry, tmp_path, lambda: False) == 0
            admin = client.admin()
            (queue,) = admin.queues("revenue")
            messages = [(message.keys, message.body) for message in admin.read(queue.queue, queue.begin, queue.end)]
        sums = {keys: json.loads(body) for keys, body in messages}
        assert len(sums) == len({(keys, body) for keys, body in messages}) == len(expected)
        told = {(row["shop"], minute(datetime.fromisoformat(row["minute"]))): row for row in sums.values()}
        assert {key: (row["payments"], row["cents"]) for key, row in told.items()} == expected
        rows = [((row["shop"], minute(row["minute"])), row) for row in pq.read_table(tmp_path / "out" / "parquet").to_pylist()]
        assert len(rows) == len(expected)
        assert {key: (row["payments"], row["cents"]) for key, row in rows} == expected


def minute(told: datetime) -> int:
    return int(told.timestamp()) // 60
