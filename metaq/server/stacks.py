"""What each thread and each greenlet is doing."""

import gc
import io

from gevent.util import print_run_info


def stacks() -> str:
    """The stacks, innermost call last. The loop stands still meanwhile, some tens of milliseconds."""
    gc.unfreeze()  # gevent finds greenlets among the objects that the garbage collector looks at
    try:
        text = io.StringIO()
        print_run_info(file=text)
        return text.getvalue()
    finally:
        gc.freeze()
