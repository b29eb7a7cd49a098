"""The GPU backend: an artifact's graph as a sequence of steps over PyTorch, on a CUDA card or, to test it, on the CPU.

``adapt`` says what of the graph is computed otherwise, ``packed`` is a batch on the device, ``program`` turns the graph
into steps, and ``steps`` has a function for each op. ``runnable`` runs them. Nothing else imports PyTorch.
"""
