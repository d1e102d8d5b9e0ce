"""The table of operations in docs/rest.md: ``python -m tests.docs.rest`` makes it of the operations themselves."""

import re
from pathlib import Path
from typing import Final

from metaq.server.api.operations import OPERATIONS

PAGE: Final = Path(__file__).parents[2] / "docs" / "rest.md"
_PART: Final = re.compile(r"(?<=<!-- operations -->\n).*(?=<!-- /operations -->)", re.DOTALL)


def written(page: str) -> str:
    """Return the page with the table as it should be."""
    rows = "".join(f"| `{each.method} {each.path}` | {each.summary} |\n" for each in OPERATIONS)
    return _PART.sub(lambda _: f"\n| operation | does |\n| --- | --- |\n{rows}", page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
