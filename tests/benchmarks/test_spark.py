"""The Spark benchmark: the checks, and the source that the format ``metaq`` is compared with."""

from pathlib import Path

from pyspark.sql.datasource import InputPartition

import metaq
from benchmarks.figures import Verdict
from benchmarks.rowsource import Reader
from benchmarks.suites.spark import DISK, PARQUET, ROWS, SOURCE, WRITE, checks, table
from metaq.client.consuming.bulk import BulkConnection
from metaq.protocol.remoting.bulk import BulkFetch
from metaq.protocol.remoting.headers import Int32
from metaq.spark.reading.columns import Shape, piece_of, record_batches
from tests.support.broker import BrokerProcess


def test_the_bounds_are_ratios_of_medians() -> None:
    """Speed of Spark: beside Parquet and beside rows; what could not be taken holds nothing."""
    rates = {PARQUET: [100.0, 900.0, 1000.0], SOURCE: [570.0, 450.0, 1.0], ROWS: [150.0], DISK: [450.0], WRITE: [220_000.0]}
    found = checks(rates, [1.0, 2.0, 9.0])
    assert [check.measured for check in found] == [0.5, 3.0, 0.5, 220_000, 2.0]
    verdicts = [Verdict.HELD, Verdict.HELD, Verdict.MISSED, Verdict.HELD, Verdict.HELD]
    assert [check.must_verdict for check in found] == verdicts
    assert found[0].aim_verdict is Verdict.NOT_REACHED
    assert {check.must_verdict for check in checks({}, [])} == {Verdict.NOT_MEASURED}
    rows = {row[0]: row[1:] for row in table(rates, [1.0]).rows}
    assert rows[SOURCE] == ["450 (1 to 570)", "0.50"]
    assert rows["stream, seconds behind"] == ["1.0", "-"]


def test_the_source_that_decodes_row_by_row_has_the_same_rows(tmp_path: Path) -> None:
    """Speed of Spark: otherwise the comparison would say nothing."""
    with BrokerProcess(tmp_path / "data") as broker, metaq.connect(broker.registry) as client:
        client.admin().create_topic("bench", 1)
        messages = [metaq.OutgoingMessage(b"%d" % number, keys=f"k{number} more", tag="t") for number in range(50)]
        client.producer().send_batch("bench", [b"plain", *messages])
        (master,) = client.admin().masters()
        with BulkConnection(master.address, 30.0) as connection:
            bulk = connection.fetch(BulkFetch("bench", Int32(0), 0, Int32(1000), Int32(1 << 20)))
        columns = [row for batch in record_batches(piece_of(bulk), "bench", 0, Shape(), until=51) for row in batch.to_pylist()]
        rows = list(Reader(master.address, "bench", [51]).read(InputPartition(0)))
    assert len(rows) == 51
    assert rows == [tuple(row.values()) for row in columns]
