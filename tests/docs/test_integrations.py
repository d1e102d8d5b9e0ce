"""The READMEs of the packages for task frameworks are programs that do what they show."""

from pathlib import Path

import pytest

from tests.docs.examples import fences
from tests.docs.shell import Shell
from tests.docs.test_readme import REGISTRY, environment
from tests.support.broker import BrokerProcess


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["dramatiq", "kombu", "taskiq"])
def test_a_readme(folder: str, broker: BrokerProcess, tmp_path: Path) -> None:
    """Each program is saved and each line typed; only the port is another."""
    environ = {**environment(broker), "HOME": str(tmp_path)}
    with Shell(tmp_path, environ, lambda text: text.replace(REGISTRY, broker.registry)) as shell:
        assert len(shell.play(fences(f"integrations/{folder}/README.md"))) == 4
