"""The README is a program that does what it shows."""

from pathlib import Path
from typing import Final

import pytest
from kombu_support import broker

from tests.docs.examples import fences
from tests.docs.shell import Shell
from tests.docs.test_readme import environment
from tests.support.broker import BrokerProcess

__all__ = ["broker"]  # a fixture

README: Final = "integrations/kombu/README.md"


@pytest.mark.slow
def test_the_readme(broker: BrokerProcess, tmp_path: Path) -> None:
    """Each program is saved and each line typed; only the port is another."""
    environ = {**environment(broker), "HOME": str(tmp_path)}
    with Shell(tmp_path, environ, lambda text: text.replace("127.0.0.1:9876", broker.registry)) as shell:
        assert len(shell.play(fences(README))) == 4
