"""The parts that all tests share: the programs tests talk to (`partner`), and how Hypothesis draws its cases.

A test says what it needs: `@pytest.mark.partner("java", "mvn")`, or `pytestmark = pytest.mark.partner("telnet")` for a
whole file. The names are the first column of `.ci/packages`. A test whose partner is missing is skipped, and the end of
the run says how to get it. With REQUIRE_PARTNERS=1, as in CI, every skip of any kind is a failure.
"""

import functools
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from gevent._hub_local import get_hub_if_exists
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.support.jvms import short_lived

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = Path(__file__).parent.name
PACKAGES: Final = ROOT / ".ci" / "packages"
SPARK: Final = "tests/spark/"
"""The place whose tests share a session of Spark."""
SPARK_ALONE: Final = ("tests/spark/test_restarts.py", "tests/spark/test_oldest.py")
"""Those there that start drivers of their own, and need not wait for the others."""
TOGETHER: Final = (
    "tests/interop/",
    "tests/packaging/test_distribution.py",
    "tests/packaging/test_bare.py",
    "tests/packaging/test_integrations.py",
    "integrations/kombu/tests/test_kombu_celery.py",
)
"""Places where the slow tests of a file share a client of another language, a package that is built, or a worker of Celery."""
SLOW_BY_FIXTURES: Final = ROOT / "tests" / "interop"
"""The folder whose conftest and base classes mark tests as slow, for versions and for scenarios."""
LONG_FOLDERS: Final = (
    "spark",
    "deploy",
    "integrations",
    "packaging",
    "docs",
    "interop",
    "cluster",
    "crash",
    "cli",
    "client",
    "server",
)
"""Those whose tests take longest, in that order."""
SKIPS_FAIL: Final = os.environ.get("REQUIRE_PARTNERS") == "1"

# A slow machine is not a defect, so no test is judged by its time; a failing case prints the blob that replays it.
settings.register_profile("metaq", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("metaq")


class Partner(NamedTuple):
    """A program that tests talk to: its name, what shows that it is installed (on PATH, or a file), its package."""

    name: str
    probe: str
    package: str

    def installed(self) -> bool:
        return shutil.which(self.probe) is not None or Path(self.probe).is_file()


def read_partners() -> dict[str, Partner]:
    lines = PACKAGES.read_text("utf-8").splitlines()
    rows = [Partner(*line.split()) for line in lines if line and not line.startswith("#")]
    return {partner.name: partner for partner in rows}


PARTNERS: Final = read_partners()


def pytest_configure() -> None:
    """Take SIGINT as usual: a run in the background of a script ignores it, and so would the processes that tests start.

    And know none of the contexts of the person who runs the tests, and have JVMs start fast.
    """
    os.environ.update(short_lived())
    os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir(), "metaq-tests-have-no-contexts"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what was imported and collected to itself: Python's collector looked at it again and again, a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Let the time of gevent's loop go on.

    It stands still between tests that use the loop, and a deadline of the next one would be over when it begins.
    """
    hub = get_hub_if_exists()
    if hub is not None:
        hub.loop.update_now()


def pytest_report_header() -> str:
    """Show which partners are missing before the first test runs."""
    missing = [partner for partner in PARTNERS.values() if not partner.installed()]
    if not missing:
        return "partners: all are installed"
    names, packages = (", ".join(partner.name for partner in missing), " ".join(partner.package for partner in missing))
    return f"partners missing, whose tests are skipped: {names}; apt-get install {packages}"


@pytest.hookimpl(trylast=True)  # when those that are not asked for have gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check the names of partners, and begin with what takes long.

    No process then ends with a long test while the others have nothing left to do.
    """
    items.sort(key=longest_first)
    for item in items:
        for mark in item.iter_markers("partner"):
            if not mark.args or not PARTNERS.keys() >= set(mark.args):
                known = ", ".join(PARTNERS)
                raise pytest.UsageError(f"{item.nodeid}: partner{mark.args} is not in {PACKAGES}; known: {known}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without slow tests when only these are asked for: each process would need ten seconds to import them."""
    only_slow = config.getoption("markexpr") == "slow"
    return True if only_slow and collection_path.name.startswith("test_") and not may_be_slow(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Check that no slow test is in a file that is left out."""
    if item.get_closest_marker("slow") is not None and not may_be_slow(item.path):
        raise ValueError(f"{item.nodeid} is slow by a mark of another file: add its folder to SLOW_BY_FIXTURES")


@functools.cache
def may_be_slow(file: Path) -> bool:
    """Return whether a file of tests names the mark, or is where fixtures and base classes bring it."""
    return file.is_relative_to(SLOW_BY_FIXTURES) or "mark.slow" in file.read_text("utf-8")


def longest_first(item: pytest.Item) -> tuple[float, int]:
    """Order slow tests by the limit that they set themselves, others by their folders."""
    limit = item.get_closest_marker("timeout")
    is_slow = item.get_closest_marker("slow") is not None
    parts = item.path.relative_to(ROOT).parts if item.path.is_relative_to(ROOT) else ("", "")
    folder = parts[parts[0] == TESTS]
    return (
        -float(limit.args[0]) if is_slow and limit is not None else 0.0,
        LONG_FOLDERS.index(folder) if folder in LONG_FOLDERS else len(LONG_FOLDERS),
    )


class Scheduler(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Sends to one process the tests that share what takes long to make; each process would make its own.

    Of other files, fast tests stay together, and slow ones, some of which take minutes, do not.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(SPARK) and not file.startswith(SPARK_ALONE):
            return SPARK
        is_alone = self.config.getoption("markexpr") == "slow" and not file.startswith(TOGETHER)
        return nodeid if is_alone else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduler:
    """Return the scheduler of a run with several processes."""
    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = [PARTNERS[name] for mark in item.iter_markers("partner") for name in mark.args]
    for partner in needed:
        if not partner.installed():
            pytest.skip(f"needs {partner.name}: apt-get install {partner.package}")


def forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where skips are not allowed; an expected failure stays one."""
    if SKIPS_FAIL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but REQUIRE_PARTNERS=1 allows no skip: {skip_reason(report)}"


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    forbid_skip(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(skip_reason(report) for report in terminalreporter.getreports("skipped"))
    if not reasons:
        return
    terminalreporter.section("skipped, and how to get it")
    for reason, count in sorted(reasons.items()):
        terminalreporter.line(f"{count:5} skipped: {reason}")
