"""Every line that metaq can log has a stable name and a row in the page that explains it."""

import ast
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from metaq.logs import event_of, keys_of
from tests.docs.examples import ROOT

DOCUMENT: Final = "docs/events.md"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
METHODS: Final = {**{level.lower(): level for level in LEVELS}, "exception": "ERROR", "log": ""}
RESERVED: Final = {"time", "level", "logger", "event", "trace"}
AREAS: Final = {
    "The broker and the registry": ("server", "engine", "store", "timers", "dedupe", "cli"),
    "Transactions": ("tx",),
    "ZooKeeper": ("registry",),
    "Replication": ("replication",),
    "The Python client": ("client", "aio", "testing"),
    "Spark": ("spark",),
}


class Call(NamedTuple):
    """A call of a logger."""

    place: str
    package: str
    level: str
    """Empty when it is only known while it runs."""
    template: str
    arguments: list[ast.expr]


def calls() -> Iterator[Call]:
    for path in sorted((ROOT / "metaq").rglob("*.py")):
        parts = path.relative_to(ROOT / "metaq").parts
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"):
                continue
            place = f"{'/'.join(parts)}:{node.lineno}"
            at = 1 if node.func.attr == "log" else 0
            template = node.args[at]
            assert isinstance(template, ast.Constant) and isinstance(template.value, str), f"{place}: the template is no text"
            yield Call(place, parts[0], METHODS[node.func.attr], template.value, node.args[at + 1 :])


CALLS: Final = list(calls())


class Row(NamedTuple):
    """A line of the page."""

    area: str
    event: str
    levels: list[str]
    keys: list[str]
    meaning: str
    advice: str


def rows() -> Iterator[Row]:
    area = ""
    for line in (ROOT / DOCUMENT).read_text("utf-8").splitlines():
        if line.startswith("## "):
            area = line.removeprefix("## ")
        elif area and line.startswith("| ") and not line.startswith(("| event |", "| --- ")):
            event, levels, keys, meaning, advice = (cell.strip() for cell in line.strip("|").split("|"))
            yield Row(area, event, levels.split(", "), re.findall(r"\w+", keys), meaning, advice)


ROWS: Final = {row.event: row for row in rows()}


def test_every_event_has_a_row() -> None:
    """E-19: and the page has no event that nothing logs."""
    assert len(CALLS) > 150
    assert ROWS.keys() == {event_of(call.template) for call in CALLS}
    assert len(list(rows())) == len(ROWS)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.place)
def test_an_event_is_as_its_row_says(call: Call) -> None:
    """E-19: its level, its keys, and where to look for it."""
    row = ROWS[event_of(call.template)]
    assert set(keys_of(call.template)) <= set(row.keys)
    assert call.level in row.levels or not call.level
    packages = {other.package for other in CALLS if event_of(other.template) == row.event}
    assert packages & set(AREAS[row.area])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.place)
def test_the_name_of_an_event_is_stable(call: Call) -> None:
    """E-19: nothing is filled into it, and every value has a key that says nothing else in JSON."""
    event, keys = event_of(call.template), keys_of(call.template)
    assert event and "%" not in event and "=" not in event
    assert len(keys) == len(set(keys)) and not RESERVED & set(keys)
    values = re.findall(r"%[^%a-zA-Z]*[a-zA-Z]", call.template)
    if not any(isinstance(argument, ast.Starred) for argument in call.arguments):
        assert len(values) == len(call.arguments)
    assert len(values) <= len(keys) + call.template.count(", %")  # a key has one value, or says more in words


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.event)
def test_a_row_says_what_it_means_and_what_to_do(row: Row) -> None:
    """E-19."""
    assert len(row.meaning) > 10 and row.meaning.endswith(".")
    assert len(row.advice) > 5 and row.advice.endswith(".")
    assert set(row.levels) <= set(LEVELS)
    keys = {key for call in CALLS if event_of(call.template) == row.event for key in keys_of(call.template)}
    assert set(row.keys) == keys
    levels = {call.level for call in CALLS if event_of(call.template) == row.event}
    assert set(row.levels) == levels or "" in levels
