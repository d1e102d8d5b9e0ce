"""What the report's page shows, of tables that are written without Spark."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from metaq.spark.report.contents import Shelf, gather
from metaq.spark.report.findings import Limits
from metaq.spark.report.page import write_page
from metaq.spark.report.tables import Sampling

LAST = datetime(2026, 3, 14, 18, 0, tzinfo=UTC)
SAMPLING = Sampling(LAST - timedelta(minutes=1), LAST, 60.0, 60, [])
LIMITS = Limits(still_s=600.0, risk_s=86_400.0)
PLACE = {"broker": "east", "topic": "orders", "partition": 0}
NUMBERS = {"lag_s": 900.0, "consumed_per_s": 0.0, "produced_per_s": 10.0}
GROUP = {"in_flight": 0, "delayed": 0, "partitions": 1, "owners": 1, "owned": 1, "drain_s": None, "runway_s": None}
STATE = {"lost": 0, "waiting_s": 900.0, "unowned_s": 0.0, "owner": "c-1", "runway_s": None, "retention_ms": 3_600_000}
SPREAD = {"gini": 0.0, "largest": 10, "median": 10.0, "size": 1, "total": 10, "messages": 10}


def shelf(folder: Path, *groups: tuple[str, str, int]) -> Shelf:
    """Return tables about these names, kinds and lags of groups of a topic."""
    names = [({"group": group, "kind": kind, "topic": "orders"}, lag) for group, kind, lag in groups]
    times = [SAMPLING.first, SAMPLING.last]
    tables: dict[str, list[dict[str, Any]]] = {
        "partitions": [{**PLACE, **name, **NUMBERS, **STATE, "lag": lag} for name, lag in names],
        "groups": [{**name, **NUMBERS, **GROUP, "lag": lag, "retention_used": 0.1, "kept": 10} for name, lag in names],
        "over_time": [{**name, **NUMBERS, "at": at, "lag": lag} for name, lag in names for at in times],
        "series": [{**PLACE, **name, "at": at, "lag": lag} for name, lag in names for at in times],
        "topics": [{**PLACE, **SPREAD}],
    }
    for table, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{table}.parquet")
    return Shelf(folder)


def test_groups_of_two_kinds_are_two_groups(tmp_path: Path) -> None:
    """P18: though they have the same name; nothing of one is counted for the other."""
    kinds = ("billing", "remoting", 70), ("billing", "observed", 30), ("audit", "remoting", 0)
    found = gather(shelf(tmp_path, *kinds), SAMPLING, LIMITS)
    assert {(one.kind, one.group, one.lag, len(one.partitions)) for one in found.findings} == {
        ("stuck", "billing", 70, 1),
        ("stuck", "billing (observed)", 30, 1),
    }
    assert len({one.key for one in found.findings}) == 2
    shown = {group.row["name"]: group for group in found.groups}
    assert {name: list(group.lags) for name, group in shown.items()} == {
        "billing": [70, 70],
        "billing (observed)": [30, 30],
        "audit": [0, 0],
    }
    assert [len(shown[name].findings) for name in ("billing", "billing (observed)", "audit")] == [1, 1, 0]
    assert {heat.title: heat.values for heat in found.heats} == {
        "billing · orders": [[70, 70]],
        "billing (observed) · orders": [[30, 30]],
    }
    assert (found.counts["groups"], found.counts["pairs"]) == (2, 3)
    assert "billing (observed)" in write_page(found)


def test_a_group_of_one_kind_has_its_name(tmp_path: Path) -> None:
    """P18."""
    found = gather(shelf(tmp_path, ("billing", "remoting", 70)), SAMPLING, LIMITS)
    assert [(one.group, one.key) for one in found.findings] == [("billing", "stuck/billing/orders/")]
    assert [group.row["name"] for group in found.groups] == ["billing"]
