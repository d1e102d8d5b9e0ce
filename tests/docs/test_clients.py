"""The Python examples of docs/clients.md do what the document shows."""

import os
import subprocess
import sys
from typing import Final, NamedTuple

import pytest

from tests.docs.examples import Fence, fences
from tests.support.broker import BrokerProcess

DOCUMENT: Final = "docs/clients.md"
ADDRESS: Final = "127.0.0.1:9876"
DEADLINE_S: Final = 120.0
PRELUDE: Final = f'import metaq\n\nclient = metaq.connect("{ADDRESS}")\n'
"""What the document says of its examples: in them there is a client."""


class Example(NamedTuple):
    """A program, and what it prints."""

    program: Fence
    output: str


def examples() -> list[Example]:
    """Each fence of Python, with the fence of text behind it."""
    found: list[Example] = []
    for fence in fences(DOCUMENT):
        if fence.kind == "python":
            found.append(Example(fence, ""))
        elif fence.kind == "text" and found and not found[-1].output:
            found[-1] = found[-1]._replace(output=fence.text)
    return found


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.program.place)
def test_an_example(broker: BrokerProcess, example: Example) -> None:
    """RD-015, RD-017: it runs as it stands, and prints what is shown."""
    text = example.program.text
    prelude = "" if "metaq.connect(" in text else PRELUDE
    play(f"{prelude}{text}".replace(ADDRESS, broker.registry), example.output)


def test_the_worker_that_leases_needs_no_broker() -> None:
    """E-08, RD-017: the same program against the broker for tests."""
    (worker,) = (example for example in examples() if "lease_consumer(" in example.program.text)
    assert "cancel(" in worker.program.text
    assert "reject(" in worker.program.text
    program = "".join(f"    {line}\n" for line in worker.program.text.splitlines()).replace(f'"{ADDRESS}"', "broker.address")
    play(f"import metaq.testing\n\nwith metaq.testing.broker() as broker:\n{program}", worker.output)


def play(program: str, output: str) -> None:
    """Run a program, which must print this."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, output), done.stderr


def test_every_part_of_the_client_is_shown() -> None:
    """SG-119, SG-120: no example is lost."""
    assert len(examples()) >= 9
    assert all(example.output for example in examples())
