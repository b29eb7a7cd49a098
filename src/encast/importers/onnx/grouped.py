"""Keys and values that several heads share (Ainslie et al. 2023): each head gets its copy of them.

Exporters repeat the rows in heads. Here the rows of the weight are repeated that make them, as architectures do it.
"""

from __future__ import annotations

from encast.importers.onnx.reader import Reader
from encast.importers.onnx.values import Seen

__all__ = ["repeated"]

_MOST = 64
"""How many heads may share a key."""


def repeated(reader: Reader, seen: Seen, place: int, times: int) -> Seen | None:
    """Rows in heads with axis ``place``, of size 1 and behind that of the heads, ``times`` over; None for others.

    The two axes are those of heads as soon as a reshape puts them together (``arrange``).
    """
    before, after = seen.axes[:place], seen.axes[place + 1 :]
    alone = ["".join(label for label, _ in one) for one in (*before, *after)]
    groups = 1 if alone[1:2] == [""] else dict(seen.axes[1]).get("h", 0) if len(seen.axes) == 5 else 0
    if place != 2 or alone not in (["b", "h", "s", "d"], ["b", "", "s", "n"]) or not 1 < times <= _MOST:
        return None
    rows = reader.rows(seen)
    value = reader.repeated_heads(rows.value, groups, times)
    if value is None:
        return None
    if groups == 1:
        width = seen.axes[-1][0][1]
        return Seen("rows", value, (*before, (("h", times),), *after[:-1], (("d", width),)))
    return Seen("rows", value, (before[0], (("g", groups),), (("r", times),), *after))
