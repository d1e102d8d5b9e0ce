"""The rows still fit the code, an unnoticed mutant is reported, and a sample of the rows.

``make test-long`` runs them all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.mutants import mutants
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.rows import MUTANTS
from tests.mutants.runner import Case, Copy, MutantSurvived, Outcome, Report, check_plain, judge, judge_all, read_report
from tests.support.samples import seed_of_tree

pytestmark = pytest.mark.partner("git")

SAMPLE: Final = 4
QUICK: Final = "tx/test_xid.py::test_the_longest_key"
REPORT: Final = """<testsuites><testsuite>
<testcase classname="tests.engine.test_a" name="test_passed[1]" time="1.5" />
<testcase classname="tests.engine.test_a" name="test_passed[2]" time="1.5" />
<testcase classname="tests.engine.test_a" name="test_failed[1]" time="1" />
<testcase classname="tests.engine.test_a" name="test_failed[2]" time="1"><failure message="Error: no">x</failure></testcase>
<testcase classname="tests.engine.test_a" name="test_late" time="9"><failure message="Failed: Timeout">x</failure></testcase>
<testcase classname="tests.engine.test_a" name="test_late" time="1"><error message="failed on teardown">x</error></testcase>
<testcase classname="tests.engine.test_a" name="test_import" time="1"><failure message="NameError: x">x</failure></testcase>
<testcase classname="tests.engine.test_a" name="test_fixture" time="1"><error message="failed on setup">x</error></testcase>
<testcase classname="tests.engine.test_a" name="test_skipped" time="0"><skipped message="no java" /></testcase>
</testsuite></testsuites>"""


def test_every_row_breaks_something() -> None:
    """Its old text stands once in its file, and its test is there, and is the one that the table of features names."""
    assert mutants.check() == []
    assert len(MUTANTS) >= 80
    assert len({str(mutant) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize(
    ("name", "outcome", "seconds"),
    [
        ("test_passed", Outcome.PASSED, 3),
        ("test_passed[2]", Outcome.PASSED, 1.5),
        ("test_failed", Outcome.FAILED, 2),
        ("test_late", Outcome.TIMED_OUT, 10),
        ("test_import", Outcome.BROKEN, 1),
        ("test_fixture", Outcome.BROKEN, 1),
        ("test_skipped", Outcome.SKIPPED, 0),
        ("test_missing", Outcome.BROKEN, 0),
    ],
)
def test_a_failed_test_is_told_from_a_broken_run(tmp_path: Path, name: str, outcome: Outcome, seconds: float) -> None:
    """A failed test, a test that timed out and a broken run have different outcomes."""
    (tmp_path / "report.xml").write_text(REPORT)
    assert Report(read_report(tmp_path / "report.xml"), "").of(f"engine/test_a.py::{name}") == (outcome, seconds)
    assert Report(read_report(tmp_path / "no.xml"), "").of(f"engine/test_a.py::{name}") == (Outcome.BROKEN, 0)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    yield Copy(tmp_path_factory.mktemp("copy"))


@pytest.mark.parametrize(
    ("new", "told"),
    [("_KEYS_KEPT: Final = 1025", "the test is passed"), ("_KEYS_KEPT: Final = missing", "the test is broken")],
    ids=["not tested", "not defined"],
)
def test_a_mutant_that_no_test_notices_is_told(copy: Copy, new: str, told: str) -> None:
    """Neither a test that passes nor one that cannot run has noticed anything; afterwards the copy is as it was."""
    mutant = Mutant("xa", "tx/xid.py", "_KEYS_KEPT: Final = 1024", new, QUICK)
    with pytest.raises(MutantSurvived, match=told):
        judge(copy, mutant, 1.0)
    assert (copy.root / "metaq" / mutant.file).read_text() == (ROOT / "metaq" / mutant.file).read_text()


def test_what_a_row_must_be(copy: Copy) -> None:
    """The old text occurs once, and the test passes without the mutant."""
    mutant = Mutant("xa", "tx/xid.py", "Final", "", QUICK)
    with pytest.raises(MutantSurvived, match="the old text occurs"):
        judge(copy, mutant, 1.0)
    file, _, name = QUICK.partition("::")
    plain = Report([Case(f"tests.{file[:-3].replace('/', '.')}", name, 1.0, Outcome.PASSED)], "")
    assert check_plain(mutant, plain) is Outcome.PASSED
    with pytest.raises(MutantSurvived, match="without the mutant the test is broken"):
        check_plain(mutant._replace(test="tx/test_xid.py::test_none"), plain)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_the_mutants_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other rows for each commit; the seed is printed, for ``python -m tests.mutants --sample N --seed S``."""
    seed = seed_of_tree()
    with capsys.disabled():
        print(f"\nmutants: --sample {SAMPLE} --seed {seed}")
    judge_all(mutants.sample(seed, SAMPLE), tmp_path)
