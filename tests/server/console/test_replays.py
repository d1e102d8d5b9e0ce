"""Replays of dead letters from the console that fail after a part of them was made, or may have been."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import gevent
import pytest
from gevent.hub import get_hub

from metaq.errors import DiskFailed, Fenced, MetaqError, StoreError
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.server.console.pages import deadletters
from metaq.server.console.pages.deadletters import CHOSEN
from metaq.server.console.visitors import TOKEN_FIELD
from metaq.server.services.call import Call
from metaq.server.services.deadletters import MOST_LETTERS, Replayed, ReplayInput, ReplayResult, replay_dead
from tests.support.served import Answer, Browser, Served, dead_letter, warm

DEADLINE_S: Final = 60.0
GROUP: Final = "parter"
TOPIC: Final = "parted"
Service = Callable[[Call, str, ReplayInput], ReplayResult]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack, gevent.Timeout(DEADLINE_S):
        yield Served(stack, tmp_path / "data")


def replay(served: Served, letters: int, last: str = "last") -> Answer | None:
    """What the console answers who has it send so many letters again."""
    ids = [*(f"letter-{number}" for number in range(letters - 1)), last]
    token = served.broker.authentication.logins.change_token("")
    form = urlencode({TOKEN_FIELD: token, "do": "replay", **{f"{CHOSEN}{one}": "true" for one in ids}}).encode()
    lines = (
        f"POST /console/dead-letters/{GROUP} HTTP/1.1",
        "Host: localhost",
        "Sec-Fetch-Site: same-origin",
        "Content-Type: application/x-www-form-urlencoded",
        f"Content-Length: {len(form)}",
    )
    return Browser(served).ask("".join(f"{line}\r\n" for line in [*lines, ""]).encode() + form)


def failing(error: BaseException, after: int) -> Service:
    """A service that sends all letters, and fails when it has been asked so many times."""
    asked: list[ReplayInput] = []

    def service(call: Call, group: str, body: ReplayInput) -> ReplayResult:
        if len(asked) == after:
            raise error
        asked.append(body)
        return ReplayResult(len(body.offset_ids), [Replayed(one, id="1") for one in body.offset_ids])

    return service


def noted(caplog: pytest.LogCaptureFixture) -> int:
    """How many changes the log has."""
    return sum(record.getMessage().startswith("console change") for record in caplog.records)


@pytest.mark.parametrize(("error", "status"), [(Fenced("why"), 503), (StoreError("why"), 500), (DiskFailed("why"), 503)])
def test_a_replay_that_fails_in_part(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: MetaqError, status: int
) -> None:
    """E-05: is a change, and has the status of its error; one that fails as a whole is none."""
    caplog.set_level(logging.INFO)
    for after, changes in ((0, 0), (1, 1)):
        monkeypatch.setattr(deadletters, "replay_dead", failing(error, after))
        answer = replay(served, MOST_LETTERS + 1)
        assert answer is not None and int(answer.status.split()[1]) == status
        assert ("why; 256 were sent again before" in answer.body) is bool(after)
        assert noted(caplog) == changes


def test_a_replay_of_which_a_later_letter_has_no_id(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E-05: is a change, too."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(deadletters, "replay_dead", failing(StoreError(), 2))
    answer = replay(served, MOST_LETTERS + 1, "x" * 5000)
    assert answer is not None and "400" in answer.status and "256 were sent again before" in answer.body
    assert noted(caplog) == 1


@pytest.mark.parametrize("end", [gevent.Timeout, gevent.GreenletExit])
def test_a_replay_that_is_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, end: type[BaseException]
) -> None:
    """E-05: as it takes too long, or its connection is closed, may be a change, too, although nobody gets an answer."""
    caplog.set_level(logging.INFO)
    for after in (0, 1):
        caplog.clear()
        monkeypatch.setattr(deadletters, "replay_dead", failing(end(), after))
        assert replay(served, MOST_LETTERS + 1) is None
        assert noted(caplog) == 1


class CutOff(Call):
    """A call whose sends have no answer, as the broker ends what goes on."""

    def ask_each(
        self, code: Request, requests: Sequence[tuple[Mapping[str, str], bytes]], seconds: float
    ) -> list[RemotingCommand | MetaqError]:
        if code == Request.SEND_MESSAGE_V2 and self._inside is not None:
            self._inside.session.close()
        return super().ask_each(code, requests, seconds)


class Late(Call):
    """A call for whose sends nobody waits."""

    def ask_each(
        self, code: Request, requests: Sequence[tuple[Mapping[str, str], bytes]], seconds: float
    ) -> list[RemotingCommand | MetaqError]:
        return super().ask_each(code, requests, 0.0 if code == Request.SEND_MESSAGE_V2 else seconds)


@pytest.mark.parametrize(("kind", "why"), [(CutOff, "changes its role, while it answered"), (Late, "has not answered within")])
def test_letters_of_which_it_is_not_known(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type[Call], why: str
) -> None:
    """E-05: whether they were sent are not said to be refused, and may be a change."""
    caplog.set_level(logging.INFO)
    warm(served, TOPIC)
    letter = dead_letter(served, TOPIC, GROUP)
    monkeypatch.setattr(deadletters, "replay_dead", lambda _, *asked: replay_dead(served.call(kind), *asked))
    answer = replay(served, 1, letter.offset_id)
    assert answer is not None and "0 were sent again, 0 were not, and of 1 it is not known; the first:" in answer.body
    assert why in answer.body
    assert noted(caplog) == 1


class Abandoned(Call):
    """A call whose sends the broker gives up while they wait for the disk."""

    def ask_each(
        self, code: Request, requests: Sequence[tuple[Mapping[str, str], bytes]], seconds: float
    ) -> list[RemotingCommand | MetaqError]:
        turns = self.interior.turns

        def give_up(_: StoreError | None) -> None:
            """Abandon them once the turn has parked them, and before a sync can end."""
            get_hub().loop.run_callback(turns.abandon, DiskFailed("why"))

        if code == Request.SEND_MESSAGE_V2:
            turns.with_answers(give_up)
        return super().ask_each(code, requests, seconds)


def test_letters_of_which_the_broker_cannot_tell(tmp_path: Path) -> None:
    """E-05: are in doubt, although it has answered."""
    with ExitStack() as stack, gevent.Timeout(DEADLINE_S):
        served = Served(stack, tmp_path / "data", durability="disk")
        warm(served, TOPIC)
        letter = dead_letter(served, TOPIC, GROUP)
        result = replay_dead(served.call(Abandoned), GROUP, ReplayInput([letter.offset_id]))
        [replayed] = result.letters
        assert replayed.refused == "the message may be stored or not: why"
        assert replayed.in_doubt and not result.sent
