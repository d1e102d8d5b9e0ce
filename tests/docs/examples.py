"""Examples in documents: found, played against a real broker, and compared with what the document shows.

A fence of kind ``telnet`` is a session. What a person types is after ``> ``, everything else is the broker's answer. A byte
that is not printable ASCII is shown as ``·``; ``…`` stands for anything, and on a line of its own for any lines. The answer of
each reply begins on a new line, although no line end is sent after a body. An ID of a message stands for the one that the
broker has given instead, also where it is typed afterwards.
"""

import re
import socket
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
TYPED: Final = "> "
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LENGTH_AT: Final = {"result": 2, "value": 1, "message": 1}
_ID: Final = re.compile(r"\b[0-9]+-[0-9]+-[0-9a-z]{6}\b")


class Fence(NamedTuple):
    """A fenced block of a document."""

    place: str
    kind: str
    text: str


class Step(NamedTuple):
    """Lines that are typed, and what is shown behind them."""

    typed: list[str]
    shown: str


def fences(document: str, kind: str = "") -> list[Fence]:
    """The fenced blocks of a document, of one kind or of all; ``document`` is relative to the project's folder."""
    text = (ROOT / document).read_text("utf-8")
    found = [
        Fence(f"{document}:{text.count(chr(10), 0, match.start()) + 1}", match[1], match[2]) for match in _FENCE.finditer(text)
    ]
    return [fence for fence in found if not kind or fence.kind == kind]


def steps(session: str, prompt: str = TYPED) -> list[Step]:
    """A session taken apart."""
    found: list[Step] = []
    for line in session.splitlines():
        if line.startswith(prompt):
            if not found or found[-1].shown:
                found.append(Step([], ""))
            found[-1].typed.append(line.removeprefix(prompt))
        else:
            assert found, f"{line!r} is shown before anything was typed"
            found[-1] = found[-1]._replace(shown=f"{found[-1].shown}{line}\n")
    return found


def matches(shown: str, text: str) -> bool:
    """Return whether an output is as the document shows it, where ``…`` stands for any text."""
    return re.fullmatch(re.escape(shown).replace("…", ".*"), text, re.DOTALL) is not None


def printable(data: bytes) -> str:
    """Bytes as documents show them."""
    return "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "·" for byte in data.replace(b"\r\n", b"\n"))


class Conversation:
    """A plain connection to a broker, read reply by reply."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")

    def say(self, lines: list[str]) -> None:
        """Send lines as telnet would."""
        self._connection.sendall("".join(f"{line}\r\n" for line in lines).encode())

    def reply(self) -> str:
        """The next reply as documents show it; empty when the broker has closed the connection."""
        line = self._stream.readline()
        if not line:
            return ""
        tokens = line.decode().split()
        body = self._stream.read(int(tokens[_LENGTH_AT[tokens[0]]]))
        shown = printable(line + body)
        return shown if shown.endswith("\n") else f"{shown}\n"

    def replies(self, count: int) -> str:
        """So many replies."""
        return "".join(self.reply() for _ in range(count))

    def rest(self) -> str:
        """Everything that still comes after this side has said its last word."""
        self._connection.shutdown(socket.SHUT_WR)
        return printable(self._stream.read())


def count_replies(shown: str) -> int:
    """How many replies a document shows."""
    return len(re.findall(r"^(?:result|value|message) ", shown, re.MULTILINE))


def play(fence: Fence, connection: socket.socket, session: str | None = None) -> None:
    """Type a session's lines and compare what comes back; ``session`` is the fence's text unless it is given."""
    talk, ids = Conversation(connection), dict[str, str]()
    for step in steps(fence.text if session is None else session):
        talk.say([_ID.sub(lambda shown: ids.get(shown[0], shown[0]), line) for line in step.typed])
        found = talk.replies(count_replies(step.shown))
        ids.update(zip(_ID.findall(step.shown), _ID.findall(found), strict=False))
        assert matches(_ID.sub("…", step.shown), found), (
            f"{fence.place}: after {step.typed} it shows\n{step.shown}\nand there is\n{found}"
        )
    rest = talk.rest()
    assert rest == "", f"{fence.place}: more comes than it shows:\n{rest}"
