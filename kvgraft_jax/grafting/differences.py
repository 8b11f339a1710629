"""Where two results differ first: layer, key or value, and position; or a logit."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """K/V rows of the layers of one attention kind.

    Attributes:
      kind: "sliding" or "full".
      layers: their numbers in the model.
      start: position of the first row.
      kv_Lx2xSxKxH: keys at [:, 0], values at [:, 1].
    """

    kind: str
    layers: tuple[int, ...]
    start: int
    kv_Lx2xSxKxH: np.ndarray


def first(rows_a: Sequence[Rows], logits_a_V: np.ndarray, rows_b: Sequence[Rows], logits_b_V: np.ndarray) -> str | None:
    """Names the first difference in the bits of two results of equal shape; None where there is none.

    Of all differing rows it is that of the lowest layer, there a key before a value, there the lowest position; logits
    come after all rows. NaN on both sides does not count as a difference, whatever its bits.

    Args:
      rows_a, rows_b: by attention kind, in the same order; or anything with the attributes of `Rows`.
      logits_a_V, logits_b_V: float32 [V].
    """
    found = []
    for a, b in zip(rows_a, rows_b, strict=True):
        differs = _differs(a.kv_Lx2xSxKxH, b.kv_Lx2xSxKxH).any(axis=(3, 4))
        found += [(a.layers[layer], side, a.start + row) for layer, side, row in np.argwhere(differs)]
    if found:
        layer, side, position = min(found)
        return f"the {('key', 'value')[side]} of layer {layer} at position {position}"
    where = np.flatnonzero(_differs(logits_a_V, logits_b_V))
    if where.size:
        return f"the logit of token {where[0]}, {logits_a_V[where[0]]!r} against {logits_b_V[where[0]]!r}"
    return None


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return (a.view(bits) != b.view(bits)) & ~(np.isnan(a) & np.isnan(b))
