"""docs/metrics.md, the alarms and the dashboard name metrics that exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import orjson
import pytest
import yaml

from metaq.engine.figures.metrics import Metric, MetricKind
from metaq.server.http.http import OWN
from metaq.server.http.metrics import OF_BROKERS, OF_REGISTRIES
from tests.docs.examples import ROOT
from tests.support.broker import BrokerProcess, RegistryProcess
from tests.support.metrics import families, fetch

PAGE: Final = ROOT / "docs" / "metrics.md"
ALARMS: Final = ROOT / "conf" / "alarms.yaml"
DASHBOARD: Final = ROOT / "docs" / "metaq-grafana.json"
METRICS: Final = {metric.name: metric for metric in (*OWN, *OF_BROKERS)}
OF_TARGETS: Final = {"instance", "job", "cluster", "broker"}
"""Labels that Prometheus gives to what it scrapes, as the page has it configured."""
_NAME: Final = re.compile(r"\b(?:metaq|process)_[a-z_]+\b")
_LABELS: Final = re.compile(r"(?:\bby|\bignoring) \(([^)]*)\)|\{([^}]*)\}")
_SUFFIX: Final = re.compile(r"_(?:bucket|sum|count)$")


def row(metric: Metric) -> str:
    labels = " ".join(f"`{label}`" for label in metric.labels) or "-"
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help} |"


def test_the_page_has_a_row_for_each_metric() -> None:
    """E-01: with its type, unit, labels and meaning, and no others."""
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| `(?:metaq|process)_", line)]
    assert rows == [row(metric) for metric in METRICS.values()]
    assert f"\n{len(METRICS)} names." in PAGE.read_text("utf-8")


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_name_says_type_and_unit(metric: Metric) -> None:
    """E-01: as Prometheus has it: counters end in total, base units are named, and there is help."""
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    for unit in ("bytes", "seconds", "ratio"):
        assert (unit in metric.name.split("_")) == (metric.unit == unit), unit
    assert metric.help.endswith(".") and metric.help[0].isupper()


def test_a_broker_exposes_what_the_page_says(tmp_path: Path) -> None:
    """E-01: all of it and nothing else, read by Prometheus's own parser."""
    with BrokerProcess(tmp_path / "data") as broker:
        found = families(broker)
        assert list(found) == list(METRICS)
        for name, family in found.items():
            assert (family.type, family.documentation) == (METRICS[name].kind, METRICS[name].help)
        status, body = fetch(broker, "/readyz")
        assert (status, body.decode().strip()) in example_of_readiness()


def example_of_readiness() -> Iterator[tuple[int, str]]:
    for line in PAGE.read_text("utf-8").splitlines():
        if line.strip().startswith('{"ready":true'):
            yield 200, line.strip()


def test_a_registry_exposes_part_of_it(tmp_path: Path) -> None:
    """E-01: what every process has, and its tables."""
    with RegistryProcess(tmp_path / "registry") as registry:
        assert set(families(registry)) == {metric.name for metric in (*OWN, *OF_REGISTRIES)}


def check_expression(expression: str) -> None:
    """It names metrics that there are, and labels that one of them has."""
    names = _NAME.findall(_LABELS.sub("", expression))
    known: set[str] = set(OF_TARGETS)
    for name in names:
        base = _SUFFIX.sub("", name)
        histogram = base != name and base in METRICS and METRICS[base].kind is MetricKind.HISTOGRAM
        assert histogram or name in METRICS, f"{name} in {expression}"
        known.update(METRICS[base].labels if histogram else METRICS[name].labels)
        known.update(["le"] if histogram else [])
    assert names or expression.startswith("up{"), expression
    for grouped, chosen in _LABELS.findall(expression):
        labels = re.findall(r"(\w+)\s*(?:=|!)", chosen) if chosen else re.split(r",\s*", grouped)
        assert set(labels) <= known, expression


def surviving(expression: str) -> set[str]:
    """The labels that what an expression finds still has."""
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    if grouped:
        return set.intersection(*(set(re.split(r",\s*", labels)) for labels in grouped))
    names = [_SUFFIX.sub("", name) for name in _NAME.findall(_LABELS.sub("", expression))]
    return OF_TARGETS.union(*(METRICS[name].labels for name in names))


def test_alarms() -> None:
    """E-01: each expression names what is measured; the page has the same alarms, and says what to do about each."""
    (group,) = yaml.safe_load(ALARMS.read_text("utf-8"))["groups"]
    for rule in group["rules"]:
        check_expression(rule["expr"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        line = re.search(rf"^\| `{rule['alert']}` \| (\w+) \| (.+?) \| (.+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
        assert line is not None, rule["alert"]
        assert line[1] == rule["labels"]["severity"]
        summary = rule["annotations"]["summary"]
        where, _, says = summary.partition(": ")
        assert re.fullmatch(r"\{\{ \$labels\.\w+ \}\}(?:/\{\{ \$labels\.\w+ \}\})*", where)
        assert set(re.findall(r"\$labels\.(\w+)", summary)) <= surviving(rule["expr"]), rule["alert"]
        assert says == line[2]
    assert len(group["rules"]) == PAGE.read_text("utf-8").count("\n| `Metaq")


def test_the_dashboard() -> None:
    """E-01: every expression of every panel names what is measured."""
    panels = orjson.loads(DASHBOARD.read_bytes())["panels"]
    assert len(panels) > 15
    for panel in panels:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            check_expression(target["expr"])


def test_what_is_grouped_away_does_not_survive() -> None:
    """E-01: a summary that names it would say nothing."""
    assert surviving("sum by (cluster, broker) (metaq_is_master) == 0") == {"cluster", "broker"}
    assert surviving("metaq_replica_lag_seconds > 30") == {*OF_TARGETS, "replica"}


@pytest.mark.parametrize(
    "expression",
    ["rate(metaq_nothing_total[5m])", "metaq_held_pulls_count > 1", "sum by (topic) (metaq_held_pulls)", "1 > 0"],
)
def test_a_wrong_expression_is_found(expression: str) -> None:
    """E-01: a name that is not measured, a part of no histogram, a label that nothing has, nothing at all."""
    with pytest.raises(AssertionError):
        check_expression(expression)
