"""One broker for all tests of the two ways of a publish."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Final

import pytest

from tests.support.served import JSON, ROOT, Browser, Served

TOPICS: Final[Mapping[str, Mapping[str, object]]] = {
    "plain": {"partitions": 2},
    "ordered": {"partitions": 1},
    "turns": {"partitions": 4},
    "levels": {"partitions": 3, "priority": True},
    "once": {"partitions": 1, "dedupe_window_ms": 60_000},
    "read-only": {"partitions": 1, "writable": False},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ExitStack() as stack:
        served = Served(stack, tmp_path_factory.mktemp("served") / "data")
        browser = Browser(served)
        for topic, settings in TOPICS.items():
            data = json.dumps(settings).encode()
            line = f"PUT {ROOT}/{topic} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: {len(data)}\r\n\r\n"
            answer = browser.ask(line.encode() + data)
            assert answer is not None
            assert answer.status == "HTTP/1.1 200 OK"
        yield served
