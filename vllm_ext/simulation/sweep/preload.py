"""What the server imports from which worker processes are forked; nothing else imports this.

One thread per process: points are what runs in parallel, and a process with threads should not be forked. Ctrl-C
reaches the whole group of processes and is the parent's to handle.
"""

import os
import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import vllm_ext.simulation.measure.metrics  # noqa: E402 - the threads are set before
import vllm_ext.simulation.run  # noqa: E402, F401 - for those who are forked
