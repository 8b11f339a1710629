"""The letters of this repository, and the one function that checks shapes against them.

Every array name ends in its axes, and the same letters stand in the einsum strings:

  B  rows of a batch               N  query heads              R  rotary pairs of a head (H / 2)
  T  tokens of one call (lanes)    K  key/value heads          D  model width
  S  cache slots, or positions     G  query heads per K (N/K)  F  hidden width of a feed-forward layer
  L  layers, when stacked          H  head width               V  vocabulary
  J  blocks of slots               E  experts                  C  experts that a token goes through
  M  entries of a list             Z  shifts of positions      P  width of a layer's own input vectors
  Q  bytes of packed bits (S / 8)  U  rows of the P table      X  hidden width of an expert, beside F

A number stands for an axis of that size. W is a number, not an axis: the lanes of the compiled step.

A *lane* is a row of the fixed-width step; a *slot* is a place in the cache buffer; a *position* is the integer given
to the rotary encoding. In this package slot and position of a cached token are the same number, always.

`k_raw_*` is a key before rotary encoding, `k_rot_*` after it. No array is plain `k`.
"""

from __future__ import annotations

from typing import Any

from kvgraft_jax import errors


def check_shape(name: str, array: Any, wanted: tuple[int | None, ...]) -> None:
    """Raises `ConfigError` unless `array` has shape `wanted`; `None` accepts any size on that axis.

    Args:
      name: the array's name with its axes, as it appears in the message.
      array: anything with a `.shape`.
      wanted: the sizes, one per axis.
    """
    got = tuple(array.shape)
    if len(got) != len(wanted) or any(w is not None and g != w for g, w in zip(got, wanted, strict=True)):
        want = "(" + ", ".join("any" if size is None else str(size) for size in wanted) + ")"
        raise errors.ConfigError(f"{name}: got shape {got}, wanted {want}")
