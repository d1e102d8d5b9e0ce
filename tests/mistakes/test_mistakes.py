"""Every mistake of the list gets exactly the answer that stands there, and no answer shows what only programmers read."""

import re
from typing import Final

import pytest

from tests.mistakes.play import played
from tests.mistakes.table import Mistake, read

MISTAKES: Final = [entry for entry in read() if isinstance(entry, Mistake)]
LEAST: Final = 120
RAW: Final = re.compile(r"Traceback|Errno|_ssl\.c|(?:: |\()b'|Error\(|the broker answered|Input should|<class|\(any\)|meta://")
"""What other libraries, the operating system and the protocols say to programs."""

Answers = dict[int, Mistake]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return {asked.line: found for asked, found in played(tmp_path_factory.mktemp("mistakes"), starting=False)}


@pytest.fixture(scope="module")
def answers_of_starts(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return {asked.line: found for asked, found in played(tmp_path_factory.mktemp("starts"), starting=True)}


def named(mistake: Mistake) -> str:
    return f"{mistake.line}: {mistake.typed}"


@pytest.mark.parametrize("mistake", [one for one in MISTAKES if not one.starts], ids=named)
def test_a_mistake_is_answered(answers: Answers, mistake: Mistake) -> None:
    assert answers[mistake.line] == mistake


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [one for one in MISTAKES if one.starts], ids=named)
def test_a_mistake_at_the_start_is_answered(answers_of_starts: Answers, mistake: Mistake) -> None:
    assert answers_of_starts[mistake.line] == mistake


def test_the_list_is_long_and_says_something_to_each() -> None:
    assert len(MISTAKES) >= LEAST
    assert len({(mistake.typed, *mistake.env.items(), mistake.stderr) for mistake in MISTAKES}) == len(MISTAKES)
    assert [mistake for mistake in MISTAKES if not mistake.stderr + mistake.stdout] == []


def test_no_answer_is_raw() -> None:
    assert [mistake for mistake in MISTAKES if RAW.search(mistake.stderr + mistake.stdout)] == []
