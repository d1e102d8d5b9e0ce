"""Chromium without a window, as tests drive it: pages with the faults that they report, and what axe-core finds on them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, sync_playwright

AXE: Final = Path(__file__).parents[1] / "server" / "console" / "axe" / "axe.min.js"
FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
DEADLINE_MS: Final = 60_000
SERIOUS: Final = ("serious", "critical")
WIDE: Final = ViewportSize(width=1280, height=900)
NARROW: Final = ViewportSize(width=360, height=740)
THEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """Run it until the end of the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def new_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """Open a page of a browser that knows nothing yet; at the end, fail when it has reported a fault.

    Such are errors of scripts, and everything that the Content Security Policy has forbidden.
    """
    context: BrowserContext = browser.new_context(**options)
    context.set_default_timeout(DEADLINE_MS)
    page, faults = context.new_page(), list[str]()
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        yield page
    finally:
        context.close()
    unexpected = [fault for fault in faults if "status of 4" not in fault]  # a page that says that something is not there
    assert unexpected == []


@cache
def axe_core() -> str:
    """Return the script of axe-core, which a page has to run before ``serious_faults``."""
    return AXE.read_text("utf-8")


def serious_faults(page: Page) -> list[str]:
    """Return what axe-core finds on a page as it is shown now: the rule, and the elements."""
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{rule['id']}: {', '.join(node['html'][:160] for node in rule['nodes'][:3])}"
        for rule in found["violations"]
        if rule["impact"] in SERIOUS
    ]


def faults_of_pages(browser: Browser, addresses: Iterable[str]) -> dict[tuple[str, str, int], list[str]]:
    """Return what is wrong with pages, by address, theme and width: what axe-core finds, and what is wider than the window."""
    faults: dict[tuple[str, str, int], list[str]] = {}
    with new_page(browser, viewport=WIDE, reduced_motion="reduce") as page:  # no colour is on its way
        for address in addresses:
            page.goto(address)
            page.evaluate(axe_core())
            for size, theme in product((WIDE, NARROW), THEMES):
                page.set_viewport_size(size)
                page.emulate_media(color_scheme=theme)
                found = serious_faults(page)
                wide = page.evaluate("document.documentElement.scrollWidth")
                if wide > size["width"]:
                    found.append(f"{wide} pixels wide")
                if found:
                    faults[address, theme, size["width"]] = found
    return faults
