"""A matrix product for GPUs of one instruction shape and one order of sums, written in Pallas for Mosaic GPU.

It is off: `products.product` does not call it, since it has run in the interpreter only, never on a GPU. It is for
Hopper, whose tensor cores multiply tiles in shared memory (`wgmma`). XLA chooses tiles and cuts of a sum by the number
of rows; here every row goes through the same instruction, 64 rows by 128 columns by 16 summed elements, in one loop
that runs over all chunks of the sum from the first element to the last, and adds in float32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from kvgraft_jax import errors

ROWS = 64
"""Rows of a tile: those of the instruction. Fewer rows are filled up, which costs little where weights are read."""

COLUMNS = 128
"""Columns of a tile."""

SUMMED = 64
"""Summed elements that are brought to shared memory at a time: 128 bytes, the widest swizzle."""

_SWIZZLE = 128
_AHEAD = 4  # Tiles on their way to shared memory.


def product(x_TxD: jax.Array, kernel: tuple[jax.Array, ...], *, interpret: Any = None) -> jax.Array:
    """Multiplies rows with a kernel [D, F] that is given in chunks of D: float32 [T, F]; see `products.product`.

    Exact: bit-exact in the number of rows in the interpreter on a CPU. There is no claim for GPUs.

    Args:
      x_TxD: bfloat16 rows, one or more.
      kernel: chunks [D_i, F] in order. They are filled up with zeros to whole tiles, which XLA would do in every step:
        store them so where speed counts.
      interpret: parameters of Pallas' interpreter for GPUs, which runs the kernel on a CPU; None compiles it.

    Raises:
      ConfigError: operands of another dtype, without rows, or of shapes that do not fit.
    """
    _check(x_TxD, kernel)
    num_rows, num_columns = x_TxD.shape[0], kernel[0].shape[1]
    rows, start = [], 0
    for chunk in kernel:
        rows.append(_filled(x_TxD[:, start : start + chunk.shape[0]], ROWS, SUMMED))
        start += chunk.shape[0]
    chunks = [_filled(chunk, SUMMED, COLUMNS) for chunk in kernel]
    padded = (rows[0].shape[0], chunks[0].shape[1])
    multiply = plgpu.kernel(
        _multiply,
        out_type=jax.ShapeDtypeStruct(padded, jnp.float32),
        scratch_types=[plgpu.SMEM((ROWS, COLUMNS), jnp.float32)],
        grid=(padded[0] // ROWS, padded[1] // COLUMNS),
        grid_names=("row", "column"),
        interpret=interpret,
    )
    return multiply(*rows, *chunks)[:num_rows, :num_columns]


def _check(x_TxD: jax.Array, kernel: tuple[jax.Array, ...]) -> None:
    found = {jnp.dtype(array.dtype).name for array in (x_TxD, *kernel)}
    if found != {"bfloat16"}:
        raise errors.ConfigError(
            f"operands: got {', '.join(sorted(found))}, wanted bfloat16; tensor cores round float32 to 19 bits, so use "
            "`products.product`"
        )
    shapes = [chunk.shape for chunk in kernel]
    summed = sum(shape[0] for shape in shapes)
    is_matrix = x_TxD.ndim == 2 and all(len(shape) == 2 and math.prod(shape) for shape in shapes)
    if (
        not kernel
        or not is_matrix
        or len({shape[1] for shape in shapes}) > 1
        or x_TxD.shape != (x_TxD.shape[0], summed)
    ):
        raise errors.ConfigError(
            f"operands: got rows {x_TxD.shape} and chunks {shapes}, wanted [T, D] and chunks [D_i, F] that add up to D"
        )
    if not x_TxD.shape[0]:
        raise errors.ConfigError("rows: got none, wanted one or more")


def _filled(matrix: jax.Array, rows: int, columns: int) -> jax.Array:
    """Fills a matrix up with zeros to whole tiles."""
    return jnp.pad(matrix, [(0, -size % tile) for size, tile in zip(matrix.shape, (rows, columns), strict=True)])


def _multiply(*refs) -> None:
    """Computes one tile of the result: chunk after chunk, tile after tile of the sum, in one accumulator."""
    *operands, out_TxF, tile_TxF = refs
    rows, chunks = operands[: len(operands) // 2], operands[len(operands) // 2 :]
    row, column = lax.axis_index("row"), lax.axis_index("column")
    transforms = (plgpu.TilingTransform((8, _SWIZZLE // 2)), plgpu.SwizzleTransform(_SWIZZLE))
    in_specs = [
        plgpu.BlockSpec((ROWS, SUMMED), lambda step: (row, step), transforms=transforms),
        plgpu.BlockSpec((SUMMED, COLUMNS), lambda step: (step, column), transforms=transforms),
    ]

    def add_chunks(total_TxF):
        def add(_, x_TxD, w_DxF):
            plgpu.wgmma(total_TxF, x_TxD, w_DxF)
            plgpu.wgmma_wait(0)

        for x_TxD, w_DxF in zip(rows, chunks, strict=True):
            num_steps = x_TxD.shape[1] // SUMMED
            ahead = min(_AHEAD, num_steps)
            plgpu.emit_pipeline(add, grid=(num_steps,), in_specs=in_specs, max_concurrent_steps=ahead)(x_TxD, w_DxF)
        return total_TxF[...]

    tile_TxF[...] = pl.run_scoped(add_chunks, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
    plgpu.commit_smem()
    place = (pl.ds(row * ROWS, ROWS), pl.ds(column * COLUMNS, COLUMNS))
    plgpu.copy_smem_to_gmem(tile_TxF, out_TxF.at[place])
    plgpu.wait_smem_to_gmem(0)
