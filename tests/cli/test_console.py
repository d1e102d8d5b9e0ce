"""`metaq console`: the address that it opens, and what it says when it cannot."""

import urllib.request
import webbrowser
from pathlib import Path

import pytest

from tests.support.broker import BrokerProcess
from tests.support.cli import Cli
from tests.support.ports import free_ports


def test_it_opens_the_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-03: the address in the ready line; without a browser it is printed."""
    opened: list[str] = []

    def opens(page: str) -> bool:
        opened.append(page)
        return len(opened) == 1  # the second time there is no browser

    monkeypatch.setattr(webbrowser, "open", opens)
    with BrokerProcess(tmp_path / "data") as broker:
        cli, page = Cli(broker.registry), f"http://{broker.http}/"
        assert f" console={page}\n" in broker.data.with_name("data.stdout").read_text()
        assert cli.text("console", broker.http) == f"{page}\n"
        assert cli.text("console", broker.http, "--print") == f"{page}\n"
        assert opened == [page]
        assert "no browser here" in cli.run("console", broker.http).stderr
        with urllib.request.urlopen(page) as answer:  # which leads on to the first page
            assert "Overview" in answer.read().decode()


def test_where_no_broker_is() -> None:
    """E-03: it says where it looked: by default on the port after that of the broker."""
    port = free_ports(2)[0]
    refused = Cli("").run("console", "--broker", f"127.0.0.1:{port}", code=3)
    assert f"127.0.0.1:{port + 1}" in refused.stderr
