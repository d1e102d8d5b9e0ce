"""The stacks of all threads and greenlets of this process, as text."""

import gc
import io


def stacks() -> str:
    """Return the stacks of all threads and greenlets, innermost call last.

    The event loop stands still for some tens of milliseconds.
    """
    from gevent.util import print_run_info  # noqa: PLC0415 - only for a person who asks

    gc.unfreeze()  # gevent finds greenlets through gc.get_objects(), which leaves out frozen objects
    try:
        text = io.StringIO()
        print_run_info(file=text)
        return text.getvalue()
    finally:
        gc.freeze()
