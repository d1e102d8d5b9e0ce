"""Pictures of the console: ``python -m tests.docs.screens`` makes those of docs/console.md, in place of those that are there.

With a folder, ``python -m tests.docs.screens FOLDER``, it takes all pages instead, in both themes and at two widths.
It needs Chromium with fonts, so that no test compares pictures.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser

from metaq.server.console.visit import ROOT
from tests.docs.examples import ROOT as PROJECT
from tests.server.console.operated import operated, operated_pages
from tests.server.console.planted import planted, planted_pages
from tests.support.broker import BrokerProcess
from tests.support.chromium import chromium, new_page
from tests.support.halves import NEVER

IMAGES: Final = PROJECT / "docs" / "images"
SIZE: Final = {"width": 1180, "height": 800}
SIZES: Final = ({"width": 1280, "height": 900}, {"width": 390, "height": 844})
THEMES: Final = ("light", "dark")
CHARTED: Final = (ROOT, f"{ROOT}/charts")


def documented(browser: Browser, http: str, offset_id: str) -> None:
    """Take the pictures of the document."""
    pages = {
        "console-overview": "/",
        "console-message": f"/messages/{offset_id}",
        "console-reset": "/groups/shipping/reset?topic=orders&place=first",
    }
    for name, path in pages.items():
        with new_page(browser, viewport=SIZE, color_scheme="light") as page:
            page.goto(f"http://{http}{ROOT}{path}")
            page.screenshot(path=IMAGES / f"{name}.png")


def everything(browser: Browser, http: str, pages: list[str], folder: Path) -> None:
    """Take pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        for theme in THEMES:
            with new_page(browser, viewport=size, color_scheme=theme) as page:
                for path in pages:
                    page.goto(f"http://{http}{path}")
                    if path in CHARTED:  # drawn once there are two samples
                        page.locator("canvas").first.wait_for()
                    name = path.removeprefix(ROOT).strip("/").replace("/", "-") or "overview"
                    page.screenshot(path=folder / f"{name}-{size['width']}-{theme}.png", full_page=True)


def main(arguments: list[str]) -> None:
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("this needs chromium")
    with (
        tempfile.TemporaryDirectory() as name,
        BrokerProcess(Path(name) / "data", *NEVER) as broker,
        planted(broker) as offset_id,
        operated(broker) as names,
        chromium(executable) as browser,
    ):
        if arguments:
            pages = [*planted_pages(offset_id), *operated_pages(names)]
            everything(browser, broker.http, list(dict.fromkeys(pages)), Path(arguments[0]))
        else:
            documented(browser, broker.http, offset_id)


if __name__ == "__main__":
    main(sys.argv[1:])
