"""The examples of the README do what it shows, each against a real broker of its own."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest

from tests.docs.examples import ROOT, Fence, fences, matches, play, printable, steps
from tests.support.broker import BrokerProcess, wait_until

README: Final = "README.md"
REGISTRY: Final = "127.0.0.1:9876"
ADDRESS: Final = "127.0.0.1 8123"
DEADLINE_S: Final = 60.0
SHELL_PROMPT: Final = "$ "


def only(kind: str) -> Fence:
    (fence,) = fences(README, kind)
    return fence


def telnet_session() -> tuple[Fence, str]:
    """The first telnet example: its fence, and the session behind the call of telnet."""
    fence = fences(README, "telnet")[0]
    call, _, session = fence.text.partition("\n")
    assert call == f"{SHELL_PROMPT}telnet {ADDRESS}"
    return fence, session


def environment(broker: BrokerProcess) -> dict[str, str]:
    """A person's environment in which this interpreter's ``metaq`` talks to ``broker``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("METAQ_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    return {**clean, "PATH": path, "METAQ_BROKER": broker.address, "METAQ_REGISTRY": broker.registry}


def test_telnet_session_over_a_plain_socket(broker: BrokerProcess) -> None:
    """MQ-001, MQ-057: byte by byte as it is shown."""
    fence, session = telnet_session()
    with broker.connect() as connection:
        play(fence, connection, session)


def test_a_worker_over_a_plain_socket(broker: BrokerProcess) -> None:
    """ES-102: a delayed put, a push, a message that is given back, and its ack."""
    _, fence = fences(README, "telnet")
    with broker.connect() as connection:
        play(fence, connection)


def visible(text: str) -> str:
    """Return the text without white space and ``·``: telnet shows line ends and unprintable bytes in its own way."""
    return re.sub(r"[\s·]", "", text)


CONNECTED: Final = visible("Escape character is '^]'.")
CLOSED: Final = visible("Connection closed by foreign host.")


class Telnet:
    """The real program, connected to a broker."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._data = b""
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: CONNECTED in self._everything(), DEADLINE_S, "telnet is connected")

    def _read(self) -> None:
        while chunk := os.read(self._output.fileno(), 65536):
            self._data += chunk

    def _everything(self) -> str:
        return visible(printable(self._data))

    @property
    def shown(self) -> str:
        """The output since telnet was connected."""
        return self._everything().partition(CONNECTED)[2]

    def type(self, lines: list[str]) -> None:
        self._input.write("".join(f"{line}\n" for line in lines).encode())
        self._input.flush()

    def expect(self, text: str) -> None:
        """Wait until it has shown so much, and compare."""
        wait_until(lambda: len(self.shown) >= len(text), DEADLINE_S, f"telnet shows {text!r}")
        assert self.shown == text


@pytest.mark.partner("telnet")
def test_telnet_session_with_telnet(broker: BrokerProcess) -> None:
    """MQ-057: typed into the real program, waiting for each answer as a person does."""
    *conversation, last = steps(telnet_session()[1])
    assert (last.typed, last.shown) == (["quit"], "")
    command = ["telnet", broker.host, str(broker.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            telnet = Telnet(process)
            expected = ""
            for step in conversation:
                telnet.type(step.typed)
                expected += visible(step.shown)
                telnet.expect(expected)
            telnet.type(last.typed)
            telnet.expect(expected + CLOSED)
        finally:
            process.kill()


def test_python_example(broker: BrokerProcess) -> None:
    """SG-129, RD-022: prints what is shown behind it."""
    fence = only("python")
    assert REGISTRY in fence.text
    program = fence.text.replace(REGISTRY, broker.registry)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert run.stdout == only("text").text


def play_in_shell(fence: Fence, broker: BrokerProcess) -> None:
    """Type each line into a shell and compare what it prints."""
    for step in steps(fence.text, SHELL_PROMPT):
        for number, line in enumerate(step.typed, start=1):
            run = subprocess.run(
                ["bash", "-o", "pipefail", "-c", line],
                env=environment(broker),
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert run.returncode == 0, (fence.place, line, run.stdout, run.stderr)
            shown = step.shown if number == len(step.typed) else ""
            assert matches(shown, run.stdout), f"{fence.place}: {line} prints\n{run.stdout}"


def test_shell_examples(broker: BrokerProcess) -> None:
    """MQ-057, E-04: each line as it stands there, in the shell."""
    play_in_shell(only("console"), broker)


def test_the_two_commands_are_there() -> None:
    """MQ-001: ``make run`` serves where the README says, ``make test`` runs the tests."""
    commands = re.findall(r"^    make (\w+)", (ROOT / README).read_text("utf-8"), re.MULTILINE)
    assert commands == ["run", "test"]
    recipes = dict(re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert recipes["run"].endswith(f"metaq serve --data data --listen {ADDRESS.replace(' ', ':')}\n")
    assert recipes["test"] == '\t$(PYTEST) -m "not slow"\n'


def test_make_run_says_what_it_does() -> None:
    """19.1: a line before each step, as a dry run shows them; the address before the broker itself says it."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "run"], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    wanted = ("making an environment", "-m venv", "installing metaq", "-m pip", "starting a broker", ADDRESS, "metaq serve")
    places = [done.stdout.find(words) for words in wanted]
    assert -1 not in places and places == sorted(places), done.stdout
