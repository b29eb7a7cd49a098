"""Reports: rows of experiments (``load``) become a document (``build``); ``compare`` says of two experiments,
row by row, what became faster.

``groups`` decides which rows belong side by side; ``overview``, ``tradeoffs``, ``results`` and ``details`` say what of
them; ``encast.pages`` makes the page.
"""
