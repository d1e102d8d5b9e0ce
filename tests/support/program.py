"""Brokers with parts replaced for a test, as programs of their own."""

import sys
from collections.abc import Callable
from typing import NoReturn

from metaq.config import Settings, load
from metaq.server.daemon import Server, run
from metaq.store.recovery.progress import Tell


def serve(make: Callable[[Settings, Tell], Server]) -> NoReturn:
    """Serve what ``make`` makes, by flags of ``metaq serve``, each with its value."""
    arguments = iter(sys.argv[1:])
    settings = load(None, {}, {flag[2:].replace("-", "_"): value for flag, value in zip(arguments, arguments, strict=True)})
    sys.exit(run(settings, make))
