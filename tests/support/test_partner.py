"""A missing partner skips its tests with the way to get it, and fails them where skips are not allowed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SKIPPING: Final = """
import pytest

@pytest.mark.partner("beanstalkd", "nats-server")
def test_with_a_partner() -> None: ...

def test_that_skips_itself() -> None:
    pytest.skip("not today")
"""
XFAIL: Final = """
import pytest

@pytest.mark.xfail
def test_that_is_expected_to_fail() -> None:
    assert False
"""
SKIPPED_FILE: Final = """
import pytest

pytest.skip("nothing here", allow_module_level=True)
"""
UNKNOWN: Final = """
import pytest

@pytest.mark.partner("no-such-program")
def test_with_a_partner() -> None: ...
"""


def run_without_programs(folder: Path, source: str, *, require: bool) -> subprocess.CompletedProcess[str]:
    """Run one test file with this project's conftest and an empty PATH."""
    (folder / "test_it.py").write_text(source, "utf-8")
    environment = {**os.environ, "PATH": str(folder), "REQUIRE_PARTNERS": "1" if require else "0"}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml", str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_skip_says_how_to_get_the_partner(tmp_path: Path) -> None:
    run = run_without_programs(tmp_path, SKIPPING, require=False)
    assert run.returncode == pytest.ExitCode.OK, run.stdout
    assert "1 skipped: needs beanstalkd: apt-get install beanstalkd" in run.stdout
    assert "1 skipped: not today" in run.stdout


def test_a_skip_fails_where_partners_are_required(tmp_path: Path) -> None:
    run = run_without_programs(tmp_path, SKIPPING, require=True)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "needs beanstalkd: apt-get install beanstalkd" in run.stdout
    # pytest calls a failure in a test's set-up, where a missing partner is met, an error.
    assert "1 failed, 1 error" in run.stdout


def test_a_skipped_file_fails_where_partners_are_required(tmp_path: Path) -> None:
    assert run_without_programs(tmp_path, SKIPPED_FILE, require=False).returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    run = run_without_programs(tmp_path, SKIPPED_FILE, require=True)
    assert run.returncode == pytest.ExitCode.INTERRUPTED, run.stdout
    assert "nothing here" in run.stdout


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    run = run_without_programs(tmp_path, XFAIL, require=True)
    assert run.returncode == pytest.ExitCode.OK, run.stdout


def test_an_unknown_partner_is_refused(tmp_path: Path) -> None:
    run = run_without_programs(tmp_path, UNKNOWN, require=False)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR, run.stdout
    assert "no-such-program" in run.stderr
