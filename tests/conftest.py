"""Makes the helpers beside this file (``checkpoints``, ``cases``, ``bounds``) importable by every test below it."""

import os

# The suites multiply thousands of tiny matrices, on which NumPy's BLAS threads only wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
