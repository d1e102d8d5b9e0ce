"""A runner of each row's test in a copy of the tree, with and without the mutant, that tells failed from broken runs.

Only a test that ran and failed has noticed a mutant. Anything else proves nothing and is reported as such: a module that cannot
be imported, a fixture that fails, no test of that name, a run without an end.
"""

import contextlib
import enum
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree as Xml

from tests.mutants.mutant import ROOT, Mutant

LIMIT_S: Final = 150.0
"""Of one test."""
WAIT: Final = 3
"""A test waits when it takes so many times as long as without the mutant, and ``LEAST_WAIT_S`` at least."""
LEAST_WAIT_S: Final = 15.0
NOT_IMPORTED: Final = re.compile(r"\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError)\b")
QUIET: Final = ("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short")


class Outcome(enum.Enum):
    """The outcome of a test; of several cases of a test, or of a case and its teardown, the first in this order counts."""

    FAILED = "failed"
    TIMED_OUT = "timed out"
    BROKEN = "broken"
    SKIPPED = "skipped"
    PASSED = "passed"


class Case(NamedTuple):
    """One case of a test, as pytest reports it."""

    module: str
    name: str
    seconds: float
    outcome: Outcome


class Report(NamedTuple):
    """One run of pytest."""

    cases: list[Case]
    output: str

    def of(self, test: str) -> tuple[Outcome, float]:
        """Return the outcome of the test of a row, and the seconds that it took."""
        file, _, name = test.partition("::")
        module = f"tests.{file.removesuffix('.py').replace('/', '.')}"
        cases = [case for case in self.cases if case.module == module and name in (case.name, case.name.partition("[")[0])]
        outcomes = {case.outcome for case in cases} or {Outcome.BROKEN}
        return next(outcome for outcome in Outcome if outcome in outcomes), sum(case.seconds for case in cases)


class MutantSurvived(AssertionError):
    """A row does not hold: its test passes with the mutant, or fails without it, or could not be run."""


class Copy:
    """The files of this project that git knows or would take, with the changes that are not committed, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve() / "tree"
        ask = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(ask, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self._environment = {**os.environ, "PYTHONPATH": str(self.root)}
        self._environment.pop("PYTEST_CURRENT_TEST", None)
        self._changes = 0
        self._check_imported()

    def _check_imported(self) -> None:
        """Check that a process started in any folder imports the copy, not what is installed."""
        ask = [sys.executable, "-c", "import metaq, tests; print(metaq.__file__, tests.__file__)"]
        told = subprocess.run(ask, cwd="/", env=self._environment, check=True, capture_output=True, text=True).stdout
        assert all(path.startswith(str(self.root)) for path in told.split()), told

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the mutant until the end of the block."""
        file = self.root / "metaq" / mutant.file
        source, times = file.read_text("utf-8"), file.stat()
        if source.count(mutant.old) != 1:
            raise MutantSurvived(f"the old text occurs {source.count(mutant.old)} times: {mutant}")
        file.write_text(source.replace(mutant.old, mutant.new), "utf-8")
        # Python takes compiled code for current when it has the second and the size of its source
        self._changes += 1
        os.utime(file, (times.st_atime, times.st_mtime + self._changes))
        try:
            yield
        finally:
            file.write_text(source, "utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Sequence[str], limit_s: float = LIMIT_S) -> Report:
        """Run tests, each for so long at most."""
        report, folder = self.root / "report.xml", self.root.parent / "basetemp"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *QUIET, f"--basetemp={folder}", f"--timeout={limit_s}"]
        command += [f"--junitxml={report}", *(f"tests/{test}" for test in dict.fromkeys(tests))]
        output = self.root.parent / "output"
        with (
            output.open("wb") as file,
            subprocess.Popen(
                command, cwd=self.root, env=self._environment, stdout=file, stderr=file, start_new_session=True
            ) as process,
        ):
            try:
                process.wait(len(tests) * limit_s + LIMIT_S)
            except subprocess.TimeoutExpired:
                report.unlink(missing_ok=True)
            finally:
                with contextlib.suppress(ProcessLookupError):  # also what a failed test has left running
                    os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        return Report(read_report(report), output.read_text("utf-8", errors="replace"))


def read_report(file: Path) -> list[Case]:
    """The cases in a report of pytest; none when it was not written, since pytest did not come to its end."""
    if not file.exists():
        return []
    cases = Xml.parse(file).iter("testcase")
    return [Case(case.get("classname", ""), case.get("name", ""), float(case.get("time", 0)), _outcome(case)) for case in cases]


def _outcome(case: Xml.Element) -> Outcome:
    failure = case.find("failure")
    if failure is not None:
        told = f"{failure.get('message')}\n{failure.text}"
        if NOT_IMPORTED.search(told):
            return Outcome.BROKEN
        return Outcome.TIMED_OUT if told.startswith("Failed: Timeout") else Outcome.FAILED
    if case.find("error") is not None:
        return Outcome.BROKEN
    return Outcome.PASSED if case.find("skipped") is None else Outcome.SKIPPED


def check_plain(mutant: Mutant, plain: Report) -> Outcome:
    """``PASSED``, or ``SKIPPED`` when the test cannot run on this machine; else ``MutantSurvived``."""
    outcome, _ = plain.of(mutant.test)
    if outcome not in (Outcome.PASSED, Outcome.SKIPPED):
        raise MutantSurvived(f"without the mutant the test is {outcome.value}: {mutant}\n{plain.output}")
    return outcome


def judge(copy: Copy, mutant: Mutant, plain_s: float) -> Outcome:
    """How a test that passes without the mutant, in ``plain_s``, noticed it; ``MutantSurvived``."""
    with copy.mutated(mutant):
        report = copy.run([mutant.test], max(LEAST_WAIT_S, WAIT * plain_s) if mutant.waits else LIMIT_S)
    outcome, _ = report.of(mutant.test)
    if outcome is Outcome.FAILED or (outcome is Outcome.TIMED_OUT and mutant.waits):
        return outcome
    raise MutantSurvived(f"with the mutant the test is {outcome.value}: {mutant}\n{report.output}")


def judge_all(mutants: Sequence[Mutant], folder: Path, *, tell: bool = False) -> Counter[str]:
    """Judge each row in a copy in a folder, and count the outcomes; ``MutantSurvived`` names every row that does not hold."""
    copy = Copy(folder)
    plain = copy.run([mutant.test for mutant in mutants])
    counts: Counter[str] = Counter()
    problems = []
    for mutant in mutants:
        began = time.monotonic()
        try:
            outcome = check_plain(mutant, plain)
            told = outcome.value if outcome is Outcome.SKIPPED else judge(copy, mutant, plain.of(mutant.test)[1]).value
        except MutantSurvived as problem:
            told = "NOT NOTICED"
            problems.append(str(problem))
        counts[told] += 1
        if tell:
            print(f"{told:11} {time.monotonic() - began:5.1f} s  {mutant}", flush=True)
    if problems:
        raise MutantSurvived("\n\n".join(problems))
    return counts
