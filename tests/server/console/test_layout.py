"""The checks of layouts that all pages have to pass: each finds the fault that is planted, and none where there is none."""

import pytest
from playwright.sync_api import Browser

from metaq.server.console.rendering import TEMPLATES
from tests.support.chromium import NARROW, layout_faults, new_page

pytestmark = pytest.mark.partner("chromium", "fonts")

STYLE = (TEMPLATES.parent / "static" / "console.css").read_text("utf-8")
LONG = "order" * 30


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (f"<main><p style='overflow-wrap:normal'>{LONG}</p></main>", "pixels wide"),
        (f"<div style='width:9rem'><p>{LONG}</p></div>", "text runs out of <p>"),
        (f"<div style='overflow:hidden;width:9rem'><span>{LONG}</span></div>", "text is cut in <div>"),
        ("<div style='overflow:hidden;height:2rem'>one<br>two<br>three</div>", "text is cut in <div>"),
        ("<button>Send</button><button style='margin-left:-20px'>Discard</button>", "<button> Send overlaps <button> Discard"),
        ("<table><thead><tr><th>Lag</th></tr></thead><tr><td class=n>7</td></tr></table>", "not below their titles"),
    ],
)
def test_a_planted_fault_is_found(browser: Browser, body: str, fault: str) -> None:
    """MQ-104: on a page of a phone's width."""
    found = faults_of(browser, body)
    assert any(fault in each for each in found), found


@pytest.mark.parametrize(
    "body",
    [
        f"<div class=scroll><table><tr><td class=t>{LONG}</td></tr></table></div>",
        f"<span class=preview>{LONG}</span>",
        f"<pre class=body>{LONG}</pre>",
        "<div class=row><button>Send</button> <button>Discard</button></div>",
        "<a href=a>a long link that goes on in the next line of the page</a> and <a href=b>another one that does as well</a>",
        "<table><thead><tr><th class=n>Lag</th></tr></thead><tbody><tr><td class=n>7</td></tr></tbody></table>",
    ],
)
def test_what_is_no_fault(browser: Browser, body: str) -> None:
    """MQ-104: what scrolls in its box, what is cut on purpose, and what stands side by side."""
    assert faults_of(browser, body) == []


def faults_of(browser: Browser, body: str) -> list[str]:
    with new_page(browser, viewport=NARROW) as page:
        page.set_content(f"<!doctype html><style>{STYLE}</style>{body}")
        return layout_faults(page)
