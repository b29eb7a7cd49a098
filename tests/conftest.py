"""Makes the helpers beside this file (``checkpoints``, ``bounds``) importable by every test below it."""
