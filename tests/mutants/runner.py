"""Runs the test of each row in a copy of the tree, with and without the mutant, and tells a failed test from a broken run.

Only a test that ran and failed has noticed a mutant. What else may happen proves nothing and is told as such: a module that
cannot be imported, a fixture that fails, no test of that name, a run without an end.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from xml.etree import ElementTree as Xml

from tests.mutants.mutant import ROOT, Mutant

LIMIT_S: Final = 150
"""Of one run. A test that waits for what the mutant never does fails by its own deadline, which is a minute."""
NOT_IMPORTED: Final = re.compile(r"\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError)\b")


class Outcome(enum.Enum):
    """What became of the test of a row."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"
    BROKEN = "broken"


class Run(NamedTuple):
    """One run of a test, and what pytest wrote."""

    outcome: Outcome
    output: str


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
        """What a test starts anywhere imports the copy, not what is installed."""
        ask = [sys.executable, "-c", "import metaq, tests; print(metaq.__file__, tests.__file__)"]
        told = subprocess.run(ask, cwd="/", env=self._environment, check=True, capture_output=True, text=True).stdout
        assert all(path.startswith(str(self.root)) for path in told.split()), told

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The copy has the mutant until the end of the block."""
        file = self.root / "metaq" / mutant.file
        source, times = file.read_text("utf-8"), file.stat()
        assert source.count(mutant.old) == 1, f"the old text does not occur once: {mutant}"
        file.write_text(source.replace(mutant.old, mutant.new), "utf-8")
        # Python takes compiled code for current when it has the second and the size of its source
        self._changes += 1
        os.utime(file, (times.st_atime, times.st_mtime + self._changes))
        try:
            yield
        finally:
            file.write_text(source, "utf-8")
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, test: str, patience_s: float = 0.0) -> Run:
        """Run one test; with a patience, one that takes longer has timed out."""
        report = self.root / "report.xml"
        report.unlink(missing_ok=True)
        limit_s = patience_s or LIMIT_S
        quiet = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
        folder = self.root.parent / "basetemp"
        command = [sys.executable, "-m", "pytest", *quiet, f"--basetemp={folder}", f"--timeout={limit_s}"]
        with subprocess.Popen(
            [*command, f"--junitxml={report}", f"tests/{test}"],
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s + LIMIT_S)
            except subprocess.TimeoutExpired:
                return Run(Outcome.BROKEN, f"no end within {limit_s + LIMIT_S} s")
            finally:
                with contextlib.suppress(ProcessLookupError):  # what a failed test may have left running
                    os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        return Run(outcome_of(report), output)


def outcome_of(report: Path) -> Outcome:
    """What pytest's report of one test, or of its cases, says."""
    if not report.exists():
        return Outcome.BROKEN
    cases = list(Xml.parse(report).iter("testcase"))
    failures = [f"{found.get('message')}\n{found.text}" for case in cases for found in case.findall("failure")]
    if any(NOT_IMPORTED.search(failure) for failure in failures):
        return Outcome.BROKEN
    if any(not failure.startswith("Failed: Timeout") for failure in failures):
        return Outcome.FAILED
    if failures:
        return Outcome.TIMED_OUT
    if not cases or any(case.findall("error") for case in cases):
        return Outcome.BROKEN
    return Outcome.SKIPPED if any(case.findall("skipped") for case in cases) else Outcome.PASSED


def judge(copy: Copy, mutant: Mutant) -> Outcome:
    """How the test noticed the mutant; ``SKIPPED`` when it cannot run on this machine; else ``MutantSurvived``."""
    plain = copy.run(mutant.test, mutant.patience_s)
    if plain.outcome is Outcome.SKIPPED:
        return plain.outcome
    if plain.outcome is not Outcome.PASSED:
        raise MutantSurvived(f"without the mutant the test {plain.outcome.value}: {mutant}\n{plain.output}")
    with copy.mutated(mutant):
        broken = copy.run(mutant.test, mutant.patience_s)
    if broken.outcome is Outcome.FAILED or (broken.outcome is Outcome.TIMED_OUT and mutant.patience_s):
        return broken.outcome
    raise MutantSurvived(f"with the mutant the test {broken.outcome.value}: {mutant}\n{broken.output}")


def judge_all(mutants: Iterable[Mutant], folder: Path, *, tell: bool = False) -> Counter[str]:
    """Judge each row in a copy in a folder, and count the outcomes; ``MutantSurvived`` names every row that does not hold."""
    copy = Copy(folder)
    counts: Counter[str] = Counter()
    problems = []
    for mutant in mutants:
        began = time.monotonic()
        try:
            outcome = judge(copy, mutant).value
        except MutantSurvived as problem:
            outcome = "NOT NOTICED"
            problems.append(str(problem))
        counts[outcome] += 1
        if tell:
            print(f"{outcome:11} {time.monotonic() - began:5.1f} s  {mutant}", flush=True)
    if problems:
        raise MutantSurvived("\n\n".join(problems))
    return counts
