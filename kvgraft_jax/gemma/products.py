"""Matrix products, sums and exponentials whose bits for a row depend on that row alone, not on how many there are.

A library chooses the order of a sum by the shapes that it is given: it cuts long sums where its kernel likes them cut,
and it adds the elements of a row in one way when there are few rows and in another when there are many. So sums are cut
here, before any library sees them, into pieces that none cuts again, and what a library would add by its own rule is
added here along one tree. Everything above is built on these functions; another implementation of a product, such
as `pallas_product`, has one place to go.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

LONGEST = 512
"""The longest sum that XLA's CPU backend takes in one piece for every number of rows. Its bfloat16 kernel would take
1,024, but where rows are many, the float32 kernel does the work."""

MOST_ELEMENTS = {"float32": 1 << 15}
"""The most elements of a matrix for which XLA's CPU backend has one order for every number of rows, by dtype."""

_CUT_BY_ROWS = range(385, 512)  # A float32 kernel cuts sums of these lengths in two, or not, by the number of rows.
_MOST_ROWS = {"float32": 32}  # With more rows, matrices of more than `MOST_ELEMENTS` are added in another order.
_LANES = 16  # Of the widest vector unit, in float32.
_FEWEST_WIDENED = 64  # From here on, a product in float32 is faster than one in bfloat16, conversions included.
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def chunk_sizes(length: int, unit: int = 1) -> tuple[int, ...]:
    """Cuts a summed axis into chunks that are short enough to be one sum each, equal and even where that is possible.

    Args:
      length: of the axis.
      unit: elements that stay together at each place of the axis, such as those of a head.

    Returns:
      The sizes, which add up to `length`.
    """
    longest, refused = max(1, LONGEST // unit), _CUT_BY_ROWS
    fewest = -(-length // longest)
    for count in range(fewest, 2 * fewest + 1):
        size, rest = divmod(length, count)
        if not rest and size * unit % 2 == 0 and size * unit not in refused:
            return (size,) * count
    size = -(-length // fewest)
    size += size % 2 and size < longest
    if size * unit in refused or length % size * unit in refused:
        size = max(1, (refused.start - 1) // unit)
    whole, rest = divmod(length, size)
    return (size,) * whole + ((rest,) if rest else ())


def dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies matrices, accumulated in float32; the caller decides when to round.

    Args:
      equation: einsum string in the repository's letters.
      a, b: operands of one dtype, bfloat16 or float32.

    Returns:
      float32.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def dot_rows(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies two matrices as `dot` does, by the faster of two ways to the same bits where rows are many.

    Sums longer than a float32 kernel takes in one piece go the plain way.

    Args:
      equation: "TD,DF->TF" or "TH,SH->TS" in any letters: the second letter is summed over.
      a, b: operands of one dtype; the rows of a are those of the result.
    """
    num_rows, length = a.shape
    is_cut = length > LONGEST
    if a.dtype != jnp.bfloat16 or num_rows < _FEWEST_WIDENED or length % 2 or is_cut:
        return dot(equation, a, b)
    plain, widened = (functools.partial(form, equation) for form in (dot, _dot_in_float32))
    return lax.platform_dependent(a, b, cpu=widened, default=plain)


def product(x_TxD: jax.Array, kernel: tuple[jax.Array, ...]) -> jax.Array:
    """Multiplies rows with a kernel [D, F] that is given in chunks of D: float32 [T, F].

    Exact: bit-exact in the number of rows: a row of the result depends only on that row of x.

    Args:
      x_TxD: rows of the kernel's dtype.
      kernel: chunks [D_i, F], in order, as `chunk_sizes` cuts them; each an array of its own, since XLA copies slices.
    """
    return _by_rows(x_TxD, lambda rows_TxD: _add_chunks("TD,DF->TF", rows_TxD, kernel, 0))


def product_with_rows(x_TxD: jax.Array, table: tuple[jax.Array, ...]) -> jax.Array:
    """Multiplies rows with those of a table [V, D] that is given in chunks of D: float32 [T, V].

    Exact: as `product`.
    """
    return _by_rows(x_TxD, lambda rows_TxD: _add_chunks("TD,VD->TV", rows_TxD, table, 1))


def row_sum(x: jax.Array) -> jax.Array:
    """Sums a float32 array over its last axis, which goes.

    Math: chunks of L, the largest power of two that divides the length, are added one after the other; then the upper
      half is added to the lower one until one element is left.
    Exact: bit-exact in all other axes: one order of additions, and no product fuses into them.
    """
    return _fold(lax.add, lax.optimization_barrier(x))


def softmax(x: jax.Array) -> jax.Array:
    """Computes the softmax of a float32 array over its last axis.

    Exact: bit-exact in all other axes. The maximum is taken along a tree, too: XLA's CPU backend gives `jnp.max` of
      4,096 elements and more to its library, together with the difference and the exponential behind it, which that
      library rounds otherwise.
    """
    exp_x = exp(x - _fold(lax.max, x)[..., None])
    return exp_x / row_sum(exp_x)[..., None]


def exp(x: jax.Array) -> jax.Array:
    """Computes the exponential of a float32 array.

    Exact: bit-exact in the array's shape. XLA computes what does not fill a vector with other code, which may round
      otherwise; so the last axis is filled up to whole vectors.
    """
    length = x.shape[-1]
    short = -length % _LANES
    if not short:
        return jnp.exp(x)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, short)]
    filled = lax.optimization_barrier(jnp.pad(x, padding))
    return lax.optimization_barrier(jnp.exp(filled))[..., :length]


def add_rounded(a: jax.Array, b: jax.Array) -> jax.Array:
    """Adds two arrays that are products, each rounded before the sum.

    In float32 a processor may add one of two products unrounded, by a fused multiply-add, and which of them depends on
    the shape of the loop around it. XLA drops barriers before it fuses, and LLVM does not look through a maximum.

    Exact: bit-exact in the arrays' shape.
    """
    if a.dtype == jnp.float32:
        a, b = (jnp.maximum(x, jnp.finfo(jnp.float32).min) for x in (a, b))
    return a + b


def _fold(combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Combines the elements of the last axis, which goes, in the order that `row_sum` states."""
    length = x.shape[-1]
    chunk = length & -length
    total = x[..., :chunk]
    for start in range(chunk, length, chunk):
        total = combine(total, x[..., start : start + chunk])
    while chunk > 1:
        chunk //= 2
        total = combine(total[..., :chunk], total[..., chunk:])
    return total[..., 0]


def _add_chunks(equation: str, x_TxD: jax.Array, chunks: tuple[jax.Array, ...], axis: int) -> jax.Array:
    start, total = 0, None
    length = chunks[0].shape[1 - axis]
    short = max(0, _LANES - length)  # A kernel with fewer columns than that is multiplied in another order.
    for chunk in chunks:
        stop = start + chunk.shape[axis]
        filled = jnp.pad(chunk, [(0, 0), (0, short)] if axis == 0 else [(0, short), (0, 0)]) if short else chunk
        part = dot_rows(equation, x_TxD[:, start:stop], filled)
        total = part if total is None else total + part
        start = stop
    return total[:, :length] if short else total


def _dot_in_float32(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiplies bfloat16 matrices through a float32 product.

    Exact: bit-equal to `dot` with kernels that do not depend on the processor, for 64 rows and more. Their bfloat16
      kernel adds pair after pair with fused multiply-adds, of each pair the second product first. The float32 kernel
      for many rows adds product after product, so both elements of every pair change places.
    """
    axes = [letters.index(equation[1]) for letters in equation.split("->")[0].split(",")]
    # A factor of 1 that XLA cannot know: else it converts all kernels of a model at once, before anything else.
    one = jnp.where(a[0, 0] > _LARGEST, jnp.float32(2), jnp.float32(1))
    a, b = (_pairs_swapped(operand, axis) for operand, axis in zip((a, b), axes, strict=True))
    return dot(equation, lax.optimization_barrier(a), lax.optimization_barrier(b * one))


def _pairs_swapped(x: jax.Array, axis: int) -> jax.Array:
    """Returns a matrix in float32, with the elements 2 i and 2 i + 1 of an axis in each other's places."""
    pairs = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    return jnp.flip(pairs, axis + 1).reshape(x.shape).astype(jnp.float32)


def _by_rows(x_TxD: jax.Array, multiply) -> jax.Array:
    """Applies a product to as many rows at a time as its order bears: never a single one, whose order is another."""
    num_rows, most = x_TxD.shape[0], _MOST_ROWS.get(x_TxD.dtype.name)
    if num_rows == 1:
        return multiply(jnp.concatenate([x_TxD, x_TxD]))[:1]
    if most is None or num_rows <= most:
        return multiply(x_TxD)
    groups = -(-num_rows // most)
    filled_TxD = jnp.pad(x_TxD, ((0, groups * most - num_rows), (0, 0)))
    parts = lax.map(multiply, filled_TxD.reshape(groups, most, -1))
    return parts.reshape(groups * most, -1)[:num_rows]


def split(array: np.ndarray | jax.Array, axis: int, sizes: tuple[int, ...]) -> list[np.ndarray | jax.Array]:
    """Returns the chunks of these sizes along an axis; of a NumPy array they are views."""
    stops = np.cumsum(sizes)
    return [array[(slice(None),) * axis + (slice(stop - size, stop),)] for size, stop in zip(sizes, stops, strict=True)]
