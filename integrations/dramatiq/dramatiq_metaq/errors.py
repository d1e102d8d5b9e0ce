"""metaq's errors in the terms of dramatiq."""

from collections.abc import Iterator
from contextlib import contextmanager

from dramatiq.errors import ConnectionClosed

import metaq
from metaq.client.connecting.transport import may_pass


@contextmanager
def told_to_dramatiq() -> Iterator[None]:
    """Raise ``ConnectionClosed`` for an error that may pass: dramatiq's workers try again after it. Others stay as they are."""
    try:
        yield
    except metaq.ClientError as error:
        if not may_pass(error):
            raise
        raise ConnectionClosed(error) from error
