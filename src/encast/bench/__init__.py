"""Measures runtimes side by side, by the same rules for all, and says how sure it is.

``config`` turns overrides into jobs, ``session`` keeps an experiment's folder, ``comparison`` measures a job. A backend
is a ``peers.base.Peer`` in a process of its own (``worker``); the ``System`` under test is one or more such instances.
What is measured is a ``scenarios.base.Scenario``. docs/howto/benchmark.md explains the method.
"""
