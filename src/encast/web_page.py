"""One HTML file that loads nothing: its frame, its style by day and by night, and the escaping of everything in it.

What a page shows comes from artifacts, peers and files of users: every text goes through ``escaped``, and the
content security policy of a page forbids it the network, whatever was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

__all__ = ["escaped", "page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --grid: #d8dee4; --paper: #fff; --raised: #f6f8fa;
  --bad: #c01c28; --good: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --grid: #30363d; --paper: #0d1117;
  --raised: #161b22; --bad: #ff7b72; --good: #56d364; } }
body { margin: 2rem auto; max-width: 1100px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .3rem 0; color: var(--soft); overflow-wrap: anywhere; }
p.warning { color: var(--bad); font-weight: 600; }
svg text { fill: var(--ink); font-size: 12px; }
svg text.soft { fill: var(--soft); }
svg .grid { stroke: var(--grid); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; }
td.text, th.text { text-align: left; }
"""


def page(title: str, style: str, body: Iterable[str], script: str = "") -> str:
    """The whole file. ``title`` is plain text; ``style`` is added to the common one; ``body`` is HTML as it stands."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title)}</title><style>{_STYLE}{style}</style></head><body>",
            *body,
            f"<script>{script}</script></body></html>" if script else "</body></html>",
            "",
        ]
    )


def escaped(text: str) -> str:
    """Text for between tags and in quoted attributes; control characters and lone surrogates are replaced."""
    shown = "".join(one if one >= " " or one == "\n" else "\ufffd" for one in text)
    return escape(shown.encode("utf-8", "replace").decode("utf-8"), quote=True)
