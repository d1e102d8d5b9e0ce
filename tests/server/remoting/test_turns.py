"""No request takes the loop for long: every code, with the largest bodies that it may have, in the worst shapes."""

import json
import time
from collections.abc import Iterator
from typing import Final

import pytest

from metaq.protocol.properties import MOST_BYTES
from metaq.protocol.remoting.codes import COMPACT, JSON, Request
from metaq.protocol.remoting.frames import MAX_HEADER_BYTES, MOST_FIELDS
from metaq.protocol.sql92 import MAX_LENGTH
from metaq.protocol.subscription import MAX_EXPRESSION_LENGTH
from metaq.server.remoting.admission import ADMITTED, TABLE_BYTES, admission
from tests.server.access.test_access import FIELDS, TO_CLIENTS
from tests.support.bodies import BODY, LEGAL, shapes, tags
from tests.support.broker import BrokerProcess
from tests.support.metrics import Values
from tests.support.remoting import RemotingClient

MOST_S: Final = "0.02"
"""Of the processor for one turn."""
TRIES: Final = 24
"""One of them must keep to that: the processor's time, too, is longer where others take its cache away."""
CANARY: Final = json.dumps([{"number": number, "text": str(number)} for number in range(20_000)])
CANARY_S: Final = 0.008
"""Of the processor to decode the canary, at best. One that takes longer is too slow for MOST_S."""
SLOW_S: Final = "0.05"
"""What counts then, for a few codes."""
MOST_SLOW: Final = 2
"""Codes of one process for which it may count."""
SETTINGS: Final = ("--failed-logins-per-minute", "1000", "--max-groups", "100000", "--max-topics", "100000")


def headers() -> Iterator[tuple[dict[str, str], int]]:
    """The longest ones, in both serializations."""
    pairs, wanted = "a\x01b\x02" * (MOST_BYTES // 4), tags(MAX_EXPRESSION_LENGTH, 1)
    name = "x" * (MAX_HEADER_BYTES // 2 - 4096)
    for serialization in (JSON, COMPACT):
        yield {**FIELDS, "maxMsgNums": "1024"}, serialization
        yield {**FIELDS, "i": pairs, "subscription": wanted}, serialization
        yield {**FIELDS, "properties": pairs}, serialization
        yield {**FIELDS, "expressionType": "SQL92", "subscription": "NOT " * (MAX_LENGTH // 4 - 2) + "a=1"}, serialization
        yield {**FIELDS, "m": "true", "batch": "true"}, serialization
        yield {**FIELDS, **{f"f{number}": "" for number in range(MOST_FIELDS - len(FIELDS))}}, serialization
        yield {**FIELDS, "topic": name, "b": name}, serialization


Frame = tuple[dict[str, str], bytes, int]
"""Fields, body and serialization of a request."""


class Loop:
    """A broker's loop, watched."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._slow: set[Request] = set()

    def check(self, code: Request, frames: list[Frame]) -> None:
        """Ask all of this, which the loop should hardly notice; what it does is asked once more by itself."""
        if not self._stretches(code, frames):
            return
        for number, frame in enumerate(frames):
            if all(self._stretches(code, [frame]) for _ in range(TRIES)):
                if self._may_be_slow(code) and not self._stretches(code, [frame], SLOW_S):
                    continue
                fields, body, _ = frame
                shown = f"frame {number}: {str(fields)[:200]} {body[:60]!r} of {len(body)} bytes"
                raise AssertionError(f"{code.name}: a turn took longer than {MOST_S} s in each of {TRIES} tries of {shown}")

    def _may_be_slow(self, code: Request) -> bool:
        """Return whether the processor is too slow for the limit, as a canary says, and few codes needed that."""
        self._slow.add(code)
        return len(self._slow) <= MOST_SLOW and min(_canary_s() for _ in range(TRIES)) > CANARY_S

    def _stretches(self, code: Request, frames: list[Frame], most_s: str = MOST_S) -> bool:
        """Return whether a turn of the loop takes longer than allowed. The turn that ends a connection counts, too."""
        before = self._long_turns(most_s)
        for some in [[frame] for frame in frames] if code in LEGAL else [frames]:
            with RemotingClient(self._broker.host, self._broker.port) as client:
                for fields, body, serialization in some:
                    client.call(code, fields, body, serialization=serialization)
        return self._long_turns(most_s) > before

    def _long_turns(self, most_s: str) -> float:
        found = Values(self._broker)
        return found.get("metaq_turn_seconds_count") - found.get("metaq_turn_seconds_bucket", {"le": most_s})


def _canary_s() -> float:
    began = time.process_time()
    json.loads(CANARY)
    return time.process_time() - began


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with BrokerProcess(tmp_path_factory.mktemp("turns") / "data", *SETTINGS) as broker:
        yield Loop(broker)


def test_every_code_says_what_it_needs() -> None:
    """E-05: who may ask it, and how long its body may be; without that no handler can be registered."""
    assert set(ADMITTED) | TO_CLIENTS == set(Request)
    with pytest.raises(LookupError, match="does not say who may ask 29999"):
        admission(29_999)


@pytest.mark.slow
@pytest.mark.parametrize("code", sorted(ADMITTED))
def test_no_body_takes_the_loop_for_long(loop: Loop, code: int) -> None:
    """E-05: of no code, and neither does the end of the connection that sent it."""
    size = min(ADMITTED[code].most_bytes, BODY)
    bodies = (*LEGAL.get(code, tuple)(), *shapes(min(size, TABLE_BYTES)), bytes(size))
    frames = [({**FIELDS, "compressed": str(body[:1] == b"\x78").lower()}, body, JSON) for body in bodies]
    long = [(fields, bodies[0], serialization) for fields, serialization in headers()]
    fits = code < 1 << 15  # in the compact header, a code has 16 bits
    loop.check(Request(code), frames + [frame for frame in long if fits or frame[2] == JSON])
