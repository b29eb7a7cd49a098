"""Makes the helpers beside this file (``local``) importable by every test below it."""
