"""Pictures of the console, for people to look at.

``python -m tests.docs.screens FOLDER`` takes all pages into a folder, in both themes and at two widths, and those of
docs/console.md in place of those that are there.

What changes with each run stands still: times are as if it were noon of a certain day, and ports are the usual ones. It needs
Chromium with fonts, so that no test compares pictures; ``layout.js`` beside the tests of the console checks every page instead.
"""

import io
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from PIL import Image
from playwright.sync_api import Browser, Page, ViewportSize

from metaq.server.console.visit import ROOT
from tests.docs.examples import ROOT as PROJECT
from tests.server.console.operated import operated, operated_pages
from tests.server.console.planted import planted, planted_pages
from tests.support.broker import BrokerProcess, RegistryProcess
from tests.support.chromium import THEMES, WIDE, chromium, new_page
from tests.support.cluster import Cluster, ReplicaProcess
from tests.support.halves import NEVER
from tests.support.users import ADMIN, write_users

IMAGES: Final = PROJECT / "docs" / "images"
MOST_BYTES: Final = 80_000
"""The most bytes of a picture in a document."""
PHONE: Final = ViewportSize(width=390, height=844)
WIDTHS: Final = (WIDE, PHONE)
STILL: Final = """() => {
  const noon = Date.UTC(2026, 0, 31, 12), moved = noon - Date.now();
  for (const time of document.querySelectorAll("time")) {
    const then = new Date(Date.parse(time.dateTime) + moved).toISOString();
    time.textContent = time.textContent.length > 20 ? then.replace("T", " ").slice(0, 23) : time.textContent;
  }
  const ports = new Map();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    texts.currentNode.data = texts.currentNode.data.replace(/127\\.0\\.0\\.1:(\\d+)/g, (_, port) => {
      if (!ports.has(port)) ports.set(port, 8123 + ports.size);
      return `10.0.0.1:${ports.get(port)}`;
    });
  }
}"""
"""Puts usual times and ports in the place of those of this run."""


class Shot(NamedTuple):
    """A picture of the document."""

    name: str
    path: str
    size: ViewportSize
    theme: str = "light"


def stand_still(page: Page) -> None:
    """Wait for what a page draws, and take away what differs from run to run."""
    for canvas in page.locator("[data-chart]").all():
        canvas.locator("canvas").first.wait_for()
    page.evaluate(STILL)


def take_all(
    browser: Browser, http: str, paths: Iterable[str], folder: Path, login: Callable[[Page], None] | None = None
) -> None:
    """Take pages of a broker into a folder."""
    for size, theme in product(WIDTHS, THEMES):
        with new_page(browser, viewport=size, color_scheme=theme) as page:
            if login is not None:
                login(page)
            for path in paths:
                page.goto(f"http://{http}{path}")
                stand_still(page)
                name = re.sub(r"\W+", "-", path.removeprefix(ROOT)).strip("-")[:40] or "overview"
                page.screenshot(path=folder / f"{name}-{size['width']}-{theme}.png", full_page=True)


def document(browser: Browser, http: str, shots: Iterable[Shot]) -> None:
    """Take the pictures of the document; with as many colours as such a page has, they are a third as large."""
    for shot in shots:
        with new_page(browser, viewport=shot.size, color_scheme=shot.theme) as page:
            page.goto(f"http://{http}{ROOT}{shot.path}")
            stand_still(page)
            taken = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(96, dither=Image.Dither.NONE)
            target = IMAGES / f"{shot.name}.png"
            taken.save(target, optimize=True)
            assert target.stat().st_size < MOST_BYTES, target


@contextmanager
def replicas(folder: Path) -> Iterator[tuple[ReplicaProcess, ReplicaProcess]]:
    """Start a master with two slaves in sync, and yield the first two."""
    with RegistryProcess(folder / "registry") as registry, Cluster(folder, "--registries", registry.address) as cluster:
        master = cluster.add(1)
        slaves = [cluster.add(number, master.replication) for number in (2, 3)]
        master.wait_for(in_sync=[1, 2, 3])
        yield master, slaves[0]


def log_in(http: str) -> Callable[[Page], None]:
    def log_in_at(page: Page) -> None:
        page.goto(f"http://{http}{ROOT}/login")
        page.get_by_label("User").fill(ADMIN.name)
        page.get_by_label("Password or secret").fill(ADMIN.secret)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"**{ROOT}/")

    return log_in_at


def main(folder: Path) -> None:
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("this needs chromium")
    folder.mkdir(parents=True, exist_ok=True)
    for picture in folder.glob("*.png"):
        picture.unlink()
    with TemporaryDirectory() as name, chromium(executable) as browser:
        place = Path(name)
        with (
            BrokerProcess(place / "data", *NEVER) as broker,
            planted(broker) as offset_id,
            operated(broker) as names,
        ):
            pages = [
                *planted_pages(offset_id),
                *operated_pages(names),
                f"{ROOT}/topics/nothing",
                f"{ROOT}/topics?search=nothing",
            ]
            take_all(browser, broker.http, dict.fromkeys(pages), folder)
            middle = ViewportSize(width=1180, height=800)
            document(
                browser,
                broker.http,
                (
                    Shot("console-overview", "/", middle),
                    Shot("console-message", f"/messages/{offset_id}", middle),
                    Shot(
                        "console-reset", "/groups/shipping/reset?topic=orders&place=first", ViewportSize(width=1180, height=640)
                    ),
                    Shot("console-group-phone", "/groups/billing", PHONE, "dark"),
                ),
            )
        with replicas(place) as (master, slave):
            for one, orders in ((master, ("demote", "hand-over")), (slave, ("promote",))):
                take_all(browser, one.http, [f"{ROOT}/cluster", *(f"{ROOT}/cluster/{order}" for order in orders)], folder)
            document(browser, master.http, [Shot("console-cluster", "/cluster", ViewportSize(width=1180, height=640))])
        users = ("--users-file", str(write_users(place / "users.yaml")))
        with BrokerProcess(place / "guarded", *users) as broker:
            take_all(browser, broker.http, [f"{ROOT}/login"], folder)
            take_all(browser, broker.http, [f"{ROOT}/users", ROOT], folder, log_in(broker.http))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tests.docs.screens FOLDER")
    main(Path(sys.argv[1]))
