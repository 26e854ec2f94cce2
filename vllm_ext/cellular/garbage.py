"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import atexit
import gc


def freeze() -> None:
    """Have it never again look at the objects that there are now, up to the end of the process.

    With PyTorch imported a full collection takes a tenth of a second, for which all requests wait. vLLM's servers do
    the same when they are ready.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)
