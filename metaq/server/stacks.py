"""The stacks of all threads and greenlets of this process, as text."""

import gc
import io

from gevent.util import print_run_info


def stacks() -> str:
    """Return the stacks of all threads and greenlets, innermost call last.

    The event loop stands still for some tens of milliseconds.
    """
    gc.unfreeze()  # gevent finds greenlets through gc.get_objects(), which leaves out frozen objects
    try:
        text = io.StringIO()
        print_run_info(file=text)
        return text.getvalue()
    finally:
        gc.freeze()
