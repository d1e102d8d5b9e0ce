"""A ``put --lines`` that ends early: what it says of each line."""

from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

from metaq.cli import commands
from metaq.cli.messages.lines import lines_failed
from metaq.client import PutManyFailed
from metaq.errors import ClientError, Refused, RequestTimeout
from metaq.message import PutResult, TextPosition
from tests.support.broker import BrokerProcess
from tests.support.fakebroker import FakeBroker, answering

STORED: Final = PutResult(1, 0, TextPosition(0))
LATE: Final = Refused(500, "stored at 1 0 21, not yet disk")
IN_DOUBT: Final = Refused(500, "the message may be stored or not: the disk failed")
REFUSED: Final = Refused(400, "a body of 9 bytes is larger than 8 (max_body_bytes); it was not stored")
UNANSWERED: Final = RequestTimeout("no answer within 1 s")
LESS_SAFE: Final = "not yet as safe as configured"


@pytest.mark.parametrize(
    ("results", "known"),
    [
        ([REFUSED], "line 8 is not, none after it is"),
        ([STORED, REFUSED, STORED], "line 9 is not, 1 after it is"),
        ([REFUSED, STORED, REFUSED, STORED], "line 8 is not, 2 after it are"),
        ([UNANSWERED, UNANSWERED], "line 8 may be, later ones may be"),
        ([LATE], f"line 8 is, but {LESS_SAFE}, none after it is"),
        ([LATE, LATE, STORED, REFUSED], f"line 8 is, but {LESS_SAFE}, 2 after it are, 1 {LESS_SAFE}"),
        ([REFUSED, LATE], f"line 8 is not, 1 after it is, 1 {LESS_SAFE}"),
        ([STORED, ClientError("it was not sent: input/output error")], "line 9 is not, none after it is"),
        ([IN_DOUBT], "line 8 may be, none after it is"),
        ([REFUSED, STORED, IN_DOUBT], "line 8 is not, later ones may be"),
    ],
)
def test_what_is_known_of_each_line(results: list[PutResult | ClientError], known: str) -> None:
    """E-15, MQ-062: a refusal may say that a line is stored, or that nobody knows."""
    reason = next(result for result in results if isinstance(result, ClientError))
    for error in results:  # one object stands for many
        if isinstance(error, ClientError):
            error.__notes__ = []
    assert lines_failed(7, PutManyFailed(results)) is reason
    (note,) = reason.__notes__
    stored = 7 + results.index(reason)
    assert note == f"lines 1 to {stored} are stored, {known}"


def test_a_line_for_which_there_are_too_few_replicas(tmp_path: Path) -> None:
    """E-15, MQ-062: it is stored, and can be read as soon as it is safe; whoever sends it again gets it twice."""
    flags = ("--replication-listen", "127.0.0.1:0", "--replica-timeout-ms", "1")
    with BrokerProcess(tmp_path / "data", *flags, durability="replica") as broker:
        done = CliRunner().invoke(commands, ["put", "t", "--lines", "-", "--broker", broker.address], input=b"a\nb\n")
    assert done.exit_code == 4
    assert "refused: stored at " in done.stderr and f"; line 1 is, but {LESS_SAFE}, none after it is" in done.stderr


def test_a_line_that_may_be_stored() -> None:
    """E-15: as the disk failed before it was known to be there."""
    with FakeBroker(answering(IN_DOUBT.code, IN_DOUBT.text)) as broker:
        done = CliRunner().invoke(commands, ["put", "t", "--lines", "-", "--broker", f"127.0.0.1:{broker.port}"], input=b"a\n")
    assert done.exit_code == 4
    assert done.stderr.endswith("may be stored or not: the disk failed; line 1 may be, none after it is\n")
