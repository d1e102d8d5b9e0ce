"""Samples of a broker's metrics, as it answers them over HTTP (docs/metrics.md)."""

import base64
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from metaq.address import Address
from metaq.client.connecting.access import Access
from metaq.errors import ConnectionFailed, Refused, RequestTimeout

TIMEOUT_S: Final = 10.0
"""A broker answers a scrape after 9 s at the latest."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""The longest answer that is read. 10,000 topics and 1,000 groups are a tenth of it."""
_RECEIVE_BYTES: Final = 1 << 16
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) ([^\r]*)\r\n")
_METRIC: Final = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')
_ESCAPED: Final = re.compile(r"\\(.)")

Labels = Mapping[str, str]


class MetricsSample(NamedTuple):
    """The metrics of a process at one moment."""

    at_s: float
    """When they were asked for, in seconds of a clock that only moves forward."""
    values: Mapping[str, list[tuple[Labels, float]]]
    """The values by the metric's name, each with its labels."""

    def one(self, name: str) -> float:
        """Return the value of a metric without labels; 0 when the process does not have it, as long as it starts."""
        return sum(value for _, value in self.values.get(name, ()))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric by these of its labels."""
        return {tuple(found[label] for label in labels): value for found, value in self.values.get(name, ())}


def scrape(address: Address, login: Mapping[str, Any]) -> MetricsSample:
    """Return the metrics of the process whose HTTP port is at ``address``.

    ``login`` holds the parameters of ``Access``. ``ConnectionFailed``, ``RequestTimeout``, ``Refused``.
    """
    access = Access(**login)
    at_s = time.monotonic()
    stream = access.connect(address, TIMEOUT_S)
    try:
        stream.settimeout(TIMEOUT_S)
        stream.sendall(_request(address, access))
        answer = bytearray()
        while (part := stream.recv(_RECEIVE_BYTES)) and len(answer) <= MOST_BYTES:
            answer += part
    except TimeoutError as error:
        raise RequestTimeout(f"{address} has not answered for {TIMEOUT_S:g} s") from error
    except OSError as error:
        raise ConnectionFailed(f"the connection to {address} broke: {error}") from error
    finally:
        stream.close()
    if len(answer) > MOST_BYTES:
        raise ConnectionFailed(f"{address} sends more than {MOST_BYTES} bytes, which no broker's metrics are")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = _STATUS.match(head + b"\r\n")
    if status is None:
        raise ConnectionFailed(
            f"{address} is no HTTP port of a broker; the line `metaq ready` has it (http=), give it with --http"
        )
    if status[1] == b"401":
        raise Refused(401, f"metrics at {address} are for users; log in with --user")
    if status[1] != b"200":
        raise Refused(int(status[1]), f"{status[2].decode(errors='replace')} (metrics at {address})")
    return MetricsSample(at_s, parse(body.decode()))


def _request(address: Address, access: Access) -> bytes:
    lines = ["GET /metrics HTTP/1.1", f"Host: {address}"]
    if access.credentials is not None:
        word = base64.b64encode(f"{access.user}:{access.password}".encode()).decode()
        lines.append(f"Authorization: Basic {word}")
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def parse(text: str) -> Mapping[str, list[tuple[Labels, float]]]:
    """Return the metrics in Prometheus's text format."""
    values: dict[str, list[tuple[Labels, float]]] = {}
    for line in text.splitlines():
        found = _METRIC.fullmatch(line)
        if found is not None:  # no comment
            values.setdefault(found[1], []).append((dict(_labels(found[2] or "")), float(found[3])))
    return values


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for label in _LABEL.finditer(text):
        yield label[1], _ESCAPED.sub(lambda sign: "\n" if sign[1] == "n" else sign[1], label[2])
