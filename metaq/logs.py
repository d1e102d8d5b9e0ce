"""Log lines: one an event, ``key=value`` context, to standard error; never message bodies."""

import logging
import sys
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure(level: str) -> None:
    """Send what is at least ``level`` (DEBUG, INFO, WARNING, ERROR) to standard error."""
    logging.basicConfig(stream=sys.stderr, level=level, format=FORMAT)
