"""Chromium without a window, as tests drive it: pages with the faults that they report, and what axe-core finds on them."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal

from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, expect, sync_playwright

CONSOLE: Final = Path(__file__).parents[1] / "server" / "console"
AXE: Final = CONSOLE / "axe" / "axe.min.js"
LAYOUT: Final = CONSOLE / "layout.js"
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
NOT_THERE: Final = "status of 4"
"""The report of a browser about a page that says that something is not there."""
SERIOUS: Final = ("serious", "critical")
WIDE: Final = ViewportSize(width=1280, height=900)
NARROW: Final = ViewportSize(width=360, height=740)
THEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """Run it until the end of the block; what is expected of its pages may take ``DEADLINE_MS``."""
    expect.set_options(timeout=DEADLINE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def new_page(browser: Browser, expected: Collection[str] = (), **options: Any) -> Iterator[Page]:
    """Open a page of a browser that knows nothing yet; at the end, fail when it has reported a fault.

    Such are errors of scripts, and everything that the Content Security Policy has forbidden, unless it has one of the
    ``expected`` words.
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
    also = (NOT_THERE, *expected)
    unexpected = [fault for fault in faults if not any(words in fault for words in also)]
    assert not unexpected, unexpected


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


def layout_faults(page: Page) -> list[str]:
    """Return what is wrong with the layout of a page as it is shown now.

    That is text that is cut or runs out of its box, controls that overlap, cells that are not below their titles, and what is
    wider than the window.
    """
    found: list[str] = page.evaluate(LAYOUT.read_text("utf-8"))
    return found


def colours(page: Page) -> str:
    """Return the colours of a page: of its ground, its text, and its navigation."""
    found: str = page.evaluate(
        """Array.from(document.querySelectorAll('body, main, h1, .top'), (one) => getComputedStyle(one))
           .map((style) => style.color + style.backgroundColor).join()"""
    )
    return found


def faults_of_pages(browser: Browser, addresses: Iterable[str]) -> dict[tuple[str, str, int], list[str]]:
    """Return what is wrong with pages, by address, theme and width.

    That is what axe-core finds, contrast among it, faults of the layout, and a theme that looks as the one before.
    """
    faults: dict[tuple[str, str, int], list[str]] = {}
    with new_page(browser, viewport=WIDE, reduced_motion="reduce") as page:  # no colour is on its way
        for address in addresses:
            page.goto(address)
            page.evaluate(axe_core())
            before = ""
            for size, theme in product((WIDE, NARROW), THEMES):
                page.set_viewport_size(size)
                page.emulate_media(color_scheme=theme)
                found = [*serious_faults(page), *layout_faults(page)]
                now = colours(page)
                if now == before:
                    found.append("looks as in the other theme")
                before = now
                if found:
                    faults[address, theme, size["width"]] = found
    return faults
