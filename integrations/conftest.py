"""What holds for the tests of integrations as for all others: partners that are missing, skips that are failures."""

from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport, pytest_runtest_setup

__all__ = ("pytest_make_collect_report", "pytest_runtest_makereport", "pytest_runtest_setup")
