"""Makes the helpers beside this file (``checkpoints``, ``cases``, ``bounds``) importable by every test below it."""

import os
import signal

from hypothesis import settings

# The suites multiply thousands of tiny matrices, on which NumPy's BLAS threads only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell's job in the background ignores an interrupt, and so would the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is.
settings.register_profile("encast", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("encast")
