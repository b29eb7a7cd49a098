"""Pages and charts for everything that shows figures: ``document`` (sections of texts, tables and figures) becomes one
HTML file that loads nothing, or Markdown; ``charts`` become SVG in it. The README says why with these libraries.

Jinja2 and vl-convert are imported when the first page is made.
"""
