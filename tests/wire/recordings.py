"""Frames that unmodified RocketMQ clients sent to a broker: ``recordings/CLIENT.frames``, made by ``tests.wire.record``.

One frame a line, in hexadecimal digits; a line ``# SCENARIO`` begins a connection. Addresses of the machine are replaced by
others of the same length.
"""

from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent / "recordings"
SUFFIX: Final = ".frames"


class Recording(NamedTuple):
    """The requests and responses that a client sent over one connection, in order."""

    client: str
    scenario: str
    frames: list[bytes]


def write_recordings(client: str, recordings: list[Recording]) -> None:
    """Replace all that is known of a client."""
    lines = []
    for recording in recordings:
        lines += [f"# {recording.scenario}", *(frame.hex() for frame in recording.frames)]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / (client + SUFFIX)).write_text("\n".join(lines) + "\n", "ascii")


def read_recordings() -> list[Recording]:
    """Those of all clients."""
    found = []
    for path in sorted(FOLDER.glob("*" + SUFFIX)):
        for line in path.read_text("ascii").splitlines():
            if line.startswith("# "):
                found.append(Recording(path.name.removesuffix(SUFFIX), line[2:], []))
            else:
                found[-1].frames.append(bytes.fromhex(line))
    return found
