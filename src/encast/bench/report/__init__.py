"""Reports: rows of experiments (``load``) become a document of tables and plots (``build``), which becomes one HTML
page (``page``) or Markdown (``markdown``); ``compare`` gives a verdict on every row of two experiments.

``groups`` decides which rows belong side by side; ``results``, ``choices``, ``overview`` and ``trust`` say what about
them; ``chart`` and ``axis`` draw.
"""
