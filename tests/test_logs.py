"""The format of a log line, as text and as JSON."""

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metaq.logs import JsonFormatter, TextFormatter, event_of, keys_of
from tests.support.broker import BrokerProcess


def record(template: object, *values: object, failing: bool = False) -> logging.LogRecord:
    trace = None
    if failing:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            trace = sys.exc_info()
    return logging.LogRecord("metaq.part", logging.WARNING, __file__, 1, template, values, trace)


def as_json(*told: Any, failing: bool = False) -> dict[str, Any]:
    line = JsonFormatter().format(record(*told, failing=failing))
    assert line.isprintable()
    content: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert list(content)[:3] == ["time", "level", "logger"]
    assert (content.pop("level"), content.pop("logger")) == ("WARNING", "metaq.part")
    assert content.pop("time").endswith("Z")
    return content


@pytest.mark.parametrize(
    ("told", "event", "context"),
    [
        (("stopped",), "stopped", {}),
        (("slave follows replica=%d address=%s", 2, "a:1"), "slave follows", {"replica": 2, "address": "a:1"}),
        (("stopped reason=the disk is slow",), "stopped", {"reason": "the disk is slow"}),
        (("closed reason=%s, %d of it here", "too much", 5), "closed", {"reason": "too much, 5 of it here"}),
        (("ratio=%.2f of=%s yes=%s", 0.123, 4, True), "", {"ratio": "0.12", "of": 4, "yes": True}),
        (("given members=%s", {"a": 1}), "given", {"members": "{'a': 1}"}),
        (("share=100%% of=%s", 3), "", {"share": "100%", "of": 3}),
        # of a library
        (("Connection dropped: %s", "why=so"), "Connection dropped: why=so", {}),
        (("100%",), "100%", {}),
        (("disk 100% full",), "disk 100% full", {}),
        (("disk=%s of %d%%",), "", {"disk": "%s of %d%%"}),
        (("%(kind)s dropped",), "%(kind)s dropped", {}),
        (("took seconds=%s least=%s", math.nan, -math.inf), "took", {"seconds": "nan", "least": "-inf"}),
        (("%(kind)s dropped", {"kind": "it"}), "it dropped", {}),
        ((ValueError("no text at all"),), "no text at all", {}),
    ],
)
def test_a_line_of_json_has_the_event_and_its_context(told: Any, event: str, context: dict[str, Any]) -> None:
    """E-19: numbers as numbers, everything else as text."""
    assert as_json(*told) == {"event": event, **context}


def test_event_and_keys_of_a_template() -> None:
    """E-19: the words before the first key."""
    assert event_of("commit of a lower offset ignored group=%s topic=%s") == "commit of a lower offset ignored"
    assert keys_of("commit of a lower offset ignored group=%s topic=%s") == ["group", "topic"]
    assert (event_of("stopping"), keys_of("stopping")) == ("stopping", [])


def test_an_event_is_one_line_whatever_it_holds() -> None:
    """E-19: nobody can forge another event with a value, or hide one with control characters."""
    value = "one\nINFO two\r\u2028three\x1b[2J\x00\x85\x80\x9b2J\x9f"
    line = TextFormatter().format(record("connection closed reason=%s", value, failing=True))
    assert line.isprintable() and len(line.splitlines()) == 1
    assert r"reason=one\nINFO two\r\u2028three\x1b[2J\x00\x85\x80\x9b2J\x9f" in line
    assert r"trace=Traceback" in line and r"ValueError: two\nlines" in line
    content = as_json("connection closed reason=%s", value, failing=True)
    assert content["reason"] == value
    assert content["trace"].endswith("ValueError: two\nlines")


def test_text_that_is_no_ascii_stays() -> None:
    """E-19: names of topics and reasons in any language."""
    assert "reason=分区 é" in TextFormatter().format(record("failed reason=%s", "分区 é"))


def test_a_broker_logs_json(tmp_path: Path) -> None:
    """E-19: every line of a life of it, as its row in the page has it."""
    with BrokerProcess(tmp_path / "data", "--log-format", "json", "--log-level", "DEBUG") as broker:
        with broker.connect() as connection:
            connection.sendall(b"\xffnonsense")
            assert connection.recv(1000)
        assert broker.terminate() == 0
    lines = [json.loads(line) for line in broker.stderr().splitlines()]
    events = {line["event"]: line for line in lines}
    assert {"recovered", "stopping", "stopped"} <= events.keys()
    assert events["recovered"]["records"] == 0
    assert {"time", "level", "logger", "event"} <= set.intersection(*map(set, lines))


def test_what_a_process_says_before_it_serves_is_no_log_line(tmp_path: Path) -> None:
    """E-19: a start that fails is told to whoever starts it, as a command tells it."""
    command = [sys.executable, "-m", "metaq", "serve", "--data", str(tmp_path), "--listen", "nowhere", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("metaq: listen: ")
