"""Brokers with parts replaced for a test, as programs of their own."""

import sys
from collections.abc import Callable
from typing import NoReturn

from metaq.config import Settings, load
from metaq.server.daemon import Server, run
from metaq.store.recovery.progress import Tell


def serve(make: Callable[[Settings, Tell], Server]) -> NoReturn:
    """Serve what ``make`` makes, by flags of ``metaq serve``, each with its value: ``--flag value`` or ``--flag=value``."""
    given, arguments = {}, iter(sys.argv[1:])
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        given[flag[2:].replace("-", "_")] = value if separator else next(arguments)
    settings = load(None, {}, given)
    sys.exit(run(settings, make))
