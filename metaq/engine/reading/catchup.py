"""Reads of the log that an index needs to catch up: they are tried again until the disk can be asked."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple

import gevent

from metaq.errors import StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Values = TypeVarTuple("Values")

RETRY_S: Final = 1.0
"""Pause after a read that failed."""


def read_in_the_end(index: str, read: Callable[[*Values], T], *values: *Values) -> T:
    """Return what ``read`` returns; call it again while it raises ``StoreError``. The first failure is logged."""
    is_logged = False
    while True:
        try:
            return read(*values)
        except StoreError as error:
            if not is_logged:
                logger.error("the log cannot be read on, tried again index=%s reason=%s", index, error)
        is_logged = True
        gevent.sleep(RETRY_S)
