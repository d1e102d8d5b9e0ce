"""What a shell completes."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.client import ConsumeFrom, connect
from tests.support.broker import BrokerProcess

DEADLINE_S = 60.0
PATIENCE_S = 8.0
"""Below the timeouts of the commands themselves, above the one of completion."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("completion") / "data") as process:
        with connect(process.registry) as client:
            for topic in ("orders", "orphans", "other"):
                client.admin().create_topic(topic, partitions=1)
            with client.consumer("orders", "billing", consume_from=ConsumeFrom.FIRST) as consumer:
                consumer.commit()
        yield process
    shutil.rmtree(process.data)


def complete(*words: str, **variables: str) -> set[str]:
    """The completions of the last word."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    environment = {
        **clean,
        "_METAQ_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["metaq", *words]),
        "COMP_CWORD": str(len(words)),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-m", "metaq"], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stderr == ""
    return {line.partition(",")[2] for line in done.stdout.splitlines() if line}


@pytest.mark.slow
def test_topics_and_groups_are_completed(broker: BrokerProcess) -> None:
    """19.1: asked of the broker or of the registry that the command would use."""
    at = {"METAQ_REGISTRY": broker.registry, "METAQ_BROKER": broker.address}
    assert complete("put", "or", **at) == {"orders", "orphans"}
    assert complete("get", "--broker", broker.address, "orp") == {"orphans"}
    assert complete("topic", "show", "o", **at) == {"orders", "orphans", "other"}
    assert complete("topic", "show", "--registry", broker.registry, "oth") == {"other"}
    assert complete("why-not-consuming", "bil", **at) == {"billing"}
    assert complete("group", "lag", "", **at) == {"billing"}
    assert complete("group", "lag", "billing", "--topic", "ord", **at) == {"orders"}


def test_names_of_the_context_in_use_are_completed(broker: BrokerProcess, tmp_path: Path) -> None:
    """It says where the brokers are."""
    file = tmp_path / "metaq" / "contexts.yaml"
    file.parent.mkdir()
    file.write_text(f"use: here\ncontexts:\n  here:\n    broker: {broker.address}\n    registry: {broker.registry}\n", "utf-8")
    home = str(tmp_path)
    assert complete("get", "or", XDG_CONFIG_HOME=home) == {"orders", "orphans"}
    assert complete("group", "lag", "b", XDG_CONFIG_HOME=home) == {"billing"}


@pytest.mark.slow
def test_levels_and_paths_are_completed() -> None:
    """19.1: without a broker."""
    assert complete("serve", "--log-level", "W") == {"WARNING"}
    assert complete("serve", "--durability", "") == {"memory", "disk", "replica", "disk+replica"}
    assert complete("message", "send", "--delay-level", "1") == {"1", *(str(level) for level in range(10, 19))}
    # click has the shell complete the names of files
    for words in (("serve", "--tls-key"), ("serve", "--config"), ("--users-file",), ("put", "t", "--lines"), ("verify",)):
        assert complete(*words, "x") == {"x"}


def test_nothing_is_said_where_no_broker_answers() -> None:
    """19.1: neither an error nor a long wait, whether the port is closed or silent; and no password is asked for."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for words in (("put", "or"), ("group", "lag", "b")):
            taken_s = []
            for where in ("127.0.0.1:1", address):
                started = time.monotonic()
                at = {"METAQ_REGISTRY": where, "METAQ_BROKER": where, "METAQ_USER": "someone"}
                assert complete(*words, **at) == set()
                taken_s.append(time.monotonic() - started)
            assert taken_s[1] < taken_s[0] + PATIENCE_S
