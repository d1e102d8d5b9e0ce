"""The browser that tests of the console share."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.chromium import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium")
    assert executable is not None
    with chromium(executable) as browser:
        yield browser
