"""Products, sums and exponentials: a row's bits do not depend on the other rows; plain ones are told from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import determinism
from kvgraft_jax.gemma import attention, configurations, parameters, products

ROWS = (1, 2, 3, 4, 7, 8, 10, 16, 31, 32, 33, 63, 64, 65, 128, 256)
FEW_ROWS = (2, 3, 16, 31, 33, 256)
COLUMNS = 384  # Of a kernel; `test_columns_do_not_depend_on_those_behind_them` shows that these suffice.
DTYPES = ("bfloat16", "float32")
_270M = ((640, 1024), (640, 256), (1024, 640), (640, 2048), (2048, 640))


def chunks_of_all_models() -> list[tuple[str, int, int]]:
    """Returns the dtype and shape of every chunk of a kernel that the ten configurations have, cut to `COLUMNS`."""
    found = set()
    for config in configurations.CONFIGURATIONS.values():
        for parameter in parameters.parameters(config):
            if parameter.summed:
                shape = parameter.chunk_shapes[0]
                length = math.prod(shape[axis] for axis in parameter.summed)
                outputs = math.prod(shape) // length // max(1, parameter.matrices)
                found.update((dtype, length, min(outputs, COLUMNS)) for dtype in DTYPES)
    return sorted(found)


def numbers(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Returns numbers of both signs and of sizes far apart, so that another order of a sum gives another result."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-4, 4, shape))).astype(np.dtype(dtype))


def rows_around(row: np.ndarray, count: int, axis: int = 0) -> np.ndarray:
    """Returns `count` rows on an axis: the given one, then others that differ with the count."""
    others = numbers(1000 + count, count - 1, *row.shape, dtype=row.dtype)
    return np.moveaxis(np.concatenate([row[None], others]), 0, axis)


def first_rows(apply: Callable, row: np.ndarray, *others, counts: Iterable[int] = ROWS, axis: int = 0) -> dict:
    """Returns the bits of row 0 of a result for every number of rows, as {bits: numbers of rows}."""
    compute, found = jax.jit(apply), {}
    for count in counts:
        result = np.asarray(compute(rows_around(row, count, axis), *others))
        assert result.dtype == np.float32
        found.setdefault(np.moveaxis(result, axis, 0)[0].tobytes(), []).append(count)
    return found


def one_order(*given, **options) -> bool:
    """Returns whether `first_rows` finds the same bits for every number of rows; says which it does not, if any."""
    found = list(first_rows(*given, **options).values())
    if len(found) > 1:
        print("numbers of rows with equal bits:", found)
    return len(found) == 1


def product(x_TxD: jax.Array, *kernel: jax.Array) -> jax.Array:
    return products.product(x_TxD, kernel)


def product_with_rows(x_TxD: jax.Array, *table: jax.Array) -> jax.Array:
    return products.product_with_rows(x_TxD, table)


def kernel(length: int, columns: int, dtype: str) -> list[np.ndarray]:
    """Returns a random kernel in the chunks in which the tree holds it."""
    sizes = products.chunk_sizes(length)
    return products.split(numbers(1, length, columns, dtype=dtype), 0, sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length, columns", _270M)
def test_a_row_of_a_product_of_the_270m_does_not_depend_on_the_others(length, columns, dtype):
    columns = min(columns, COLUMNS)
    assert one_order(product, numbers(0, length, dtype=dtype), *kernel(length, columns, dtype))


@pytest.mark.parametrize("dtype, length, columns", chunks_of_all_models())
def test_a_row_of_a_product_with_chunks_of_any_model_does_not_depend_on_the_others(dtype, length, columns):
    chunks = [numbers(seed, length, columns, dtype=dtype) for seed in (1, 2)]
    assert one_order(product, numbers(0, 2 * length, dtype=dtype), *chunks, counts=FEW_ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [640, 2816, 3840])
def test_a_row_of_a_product_with_a_table_does_not_depend_on_the_others(length, dtype):
    table = [np.ascontiguousarray(chunk.T) for chunk in kernel(length, COLUMNS, dtype)]
    assert one_order(product_with_rows, numbers(0, length, dtype=dtype), *table, counts=FEW_ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 8, 17])
@pytest.mark.parametrize("apply, axis", [(product, 0), (product_with_rows, 1)], ids=["kernel", "table"])
def test_few_columns_have_the_same_order(apply, axis, columns, dtype):
    chunks = kernel(256, columns, dtype)
    chunks = [np.ascontiguousarray(chunk.T) for chunk in chunks] if axis else chunks
    assert one_order(apply, numbers(0, 256, dtype=dtype), *chunks, counts=(2, 4, 7))
    wanted = numbers(0, 256, dtype=dtype).astype(float) @ np.concatenate(kernel(256, columns, dtype)).astype(float)
    np.testing.assert_allclose(jax.jit(apply)(numbers(0, 256, dtype=dtype)[None], *chunks)[0], wanted, 1e-5, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns, table", [(21_504, False), (65_536, True)], ids=["kernel", "table"])
def test_columns_do_not_depend_on_those_behind_them(columns, table, dtype):
    length = products.LONGEST
    whole = numbers(1, columns, length, dtype=dtype) if table else numbers(1, length, columns, dtype=dtype)
    part = np.ascontiguousarray(whole[:COLUMNS] if table else whole[:, :COLUMNS])
    compute = jax.jit(product_with_rows if table else product)
    for count in (2, 3, 32, 33):
        x_TxD = numbers(count, count, length, dtype=dtype)
        found, wanted = np.asarray(compute(x_TxD, part)), np.asarray(compute(x_TxD, whole))[:, :COLUMNS]
        assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_kv_heads, num_groups, head_dim", [(1, 4, 256), (4, 2, 256), (1, 16, 512), (2, 8, 512)])
@pytest.mark.parametrize("num_slots", [128, 256])
def test_a_lane_of_attentions_products_does_not_depend_on_the_others(
    num_kv_heads, num_groups, head_dim, num_slots, dtype
):
    rows_SxKxH = numbers(1, num_slots, num_kv_heads, head_dim, dtype=dtype)
    q_KxGxH = numbers(0, num_kv_heads, num_groups, head_dim, dtype=dtype)
    p_KxGxS = numbers(2, num_kv_heads, num_groups, num_slots, dtype=dtype)
    assert one_order(attention.query_key, q_KxGxH, rows_SxKxH, counts=(2, 7, 33), axis=2)
    assert one_order(attention.weighted_values, p_KxGxS, rows_SxKxH, counts=(2, 7, 33), axis=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 33])
def test_products_are_close_to_exact_ones(count, dtype):
    x_TxD, chunks = numbers(0, count, 2048, dtype=dtype), kernel(2048, COLUMNS, dtype)
    w_DxF = np.concatenate(chunks).astype(float)
    bound = 1e-5 * (np.abs(x_TxD.astype(float)) @ np.abs(w_DxF))
    table = [np.ascontiguousarray(chunk.T) for chunk in chunks]
    for found in (jax.jit(product)(x_TxD, *chunks), jax.jit(product_with_rows)(x_TxD, *table)):
        assert (np.abs(found - x_TxD.astype(float) @ w_DxF) <= bound).all()


# The number of elements of an operand or a result at which XLA's CPU backend gives a sum to its library.
LIBRARY_ELEMENTS = 4096
LENGTHS = (1, 3, 48, 128, 255, 640, 1152, 2816)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_rows_sum_does_not_depend_on_the_others(length):
    counts = {1, 3, 33, *(max(1, LIBRARY_ELEMENTS // length + step) for step in (-1, 0, 1))}
    row = numbers(0, length)
    assert one_order(products.row_sum, row, counts=sorted(counts))
    assert one_order(lambda x: products.row_sum(jax.lax.square(x)), row, counts=(2, 7, 256))
    found = np.asarray(jax.jit(products.row_sum)(row))
    assert abs(found - row.astype(float).sum()) <= 1e-6 * np.abs(row).astype(float).sum()


@pytest.mark.parametrize("length", [96, 128, 640])
def test_a_sum_does_not_depend_on_other_axes(length):
    row = numbers(0, length)
    wanted = np.asarray(jax.jit(products.row_sum)(row))
    for shape in ((1,), (5,), (3, 7), (4, 1, 33)):
        x = np.broadcast_to(row, (*shape, length))
        assert (np.asarray(jax.jit(products.row_sum)(x)) == wanted).all()


@pytest.mark.parametrize("length", [1, 3, 17, 128])
def test_an_exponential_does_not_depend_on_its_place(length):
    row = -np.abs(numbers(0, length)) * 4
    counts = {1, 3, 33, *(max(1, LIBRARY_ELEMENTS // length + step) for step in (-1, 0, 1))}
    assert one_order(products.exp, row, counts=sorted(counts))
    found = np.asarray(jax.jit(products.exp)(row))
    np.testing.assert_allclose(found, np.exp(row.astype(float)), rtol=1e-6, atol=1e-38)
    alone = np.concatenate([np.asarray(jax.jit(products.exp)(row[i : i + 1])) for i in range(min(length, 20))])
    assert np.array_equal(alone, found[: len(alone)])


@pytest.mark.parametrize("length", [3, 8, 48, 128, 640])
def test_a_softmax_does_not_depend_on_the_other_rows(length):
    row = numbers(0, length)
    assert one_order(products.softmax, row, counts=(1, 2, 7, 16, 33, 64, 256))
    found, p = np.asarray(jax.jit(products.softmax)(row)), np.exp(row.astype(float) - row.max())
    np.testing.assert_allclose(found, p / p.sum(), rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("shape", [(2, 8), (8, 8), (33, 8), (256, 8), (33, 48), (7, 640)])
def test_products_are_rounded_before_their_sum(shape):
    a, b, c, d = (numbers(seed, *shape) for seed in range(4))
    wanted = a * b + c * d  # NumPy rounds each product.
    found = jax.jit(lambda a, b, c, d: products.add_rounded(a * b, c * d))(a, b, c, d)
    np.testing.assert_array_equal(found, wanted)
    plain = jax.jit(lambda a, b, c, d: a * b + c * d)(a, b, c, d)
    if jax.default_backend() == "cpu" and "fma" in determinism.cpu_description()["instructions"]:
        assert (np.asarray(plain) != wanted).any()  # Else the comparison above shows nothing.


def test_chunks_add_up_and_none_is_longer_than_a_single_sum():
    longest = products.LONGEST
    rng = np.random.default_rng(0)
    for length in {*range(1, 70), *rng.integers(1, 30_000, 2000).tolist(), longest, longest + 1}:
        sizes = products.chunk_sizes(length)
        assert sum(sizes) == length and 0 < min(sizes) and max(sizes) <= longest
        assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]
        assert not set(sizes) & set(range(385, 512))
        assert length > products.LONGEST * 3 // 4 or sizes == (length,)


@pytest.mark.parametrize("unit", [1, 16, 64, 128, 256, 512])
def test_chunks_of_units_are_never_longer_either(unit):
    for length in range(1, 200):
        sizes = products.chunk_sizes(length, unit)
        assert sum(sizes) == length and max(sizes) * unit <= products.LONGEST


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_the_chunks_of_every_model_are_equal_and_even(name):
    for parameter in parameters.parameters(configurations.get(name)):
        if parameter.summed:
            shapes = parameter.chunk_shapes
            sizes = [math.prod(shape[axis] for axis in parameter.summed) for shape in shapes]
            assert len(set(sizes)) == 1 and sizes[0] % 2 == 0 and sizes[0] <= products.LONGEST
            assert sum(sizes) == math.prod(parameter.shape[axis] for axis in parameter.summed)


def test_a_chunk_of_a_split_is_a_view():
    array = np.arange(12).reshape(3, 4)
    parts = products.split(array, 1, (1, 3))
    assert [part.tolist() for part in parts] == [array[:, :1].tolist(), array[:, 1:].tolist()]
    assert all(np.shares_memory(part, array) for part in parts)


# What the functions replace must be told from them by the same comparison.


def plain_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1)


def mean_of_squares(x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.square(x), axis=-1)


def softmax_with_plain_maximum(x: jax.Array) -> jax.Array:
    exp_x = products.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return exp_x / products.row_sum(exp_x)[..., None]


@pytest.mark.parametrize("apply", [plain_sum, mean_of_squares, softmax_with_plain_maximum])
def test_the_comparison_sees_that_a_plain_sum_depends_on_the_rows(apply):
    for length in (640, 256, 1152, 128):
        if len(first_rows(apply, numbers(0, length), counts=(2, 3, 8, 33, 256))) > 1:
            return
    pytest.skip(f"{apply.__name__}: this machine adds a row in one order, however many there are")


def uncut(x_TxD: jax.Array, w_DxF: jax.Array) -> jax.Array:
    return products.dot("TD,DF->TF", x_TxD, w_DxF)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_sees_that_a_single_row_has_another_order(dtype):
    for length, columns in ((640, 2048), (2048, 640), (512, 256)):
        row = numbers(0, length, dtype=dtype)
        if len(first_rows(uncut, row, numbers(1, length, columns, dtype=dtype), counts=(1, 2, 16))) > 1:
            return
    pytest.skip(f"{dtype}: this machine multiplies a single row in the order of several")


def test_the_comparison_sees_that_many_rows_of_float32_have_another_order():
    for length, columns in ((512, 640), (640, 2048), (2048, 640)):
        if len(first_rows(uncut, numbers(0, length), numbers(1, length, columns), counts=(2, 32, 64))) > 1:
            return
    pytest.skip("float32: this machine multiplies 64 rows in the order of 32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_sees_that_some_sums_are_cut_by_the_number_of_rows(dtype):
    counts = (2, 4, 10, 16, 32) if dtype == "float32" else (2, 4, 10, 16, 32, 64, 128, 256)
    for length, columns in ((480, 384), (448, 384), (2048, 640), (6912, 1152)):
        row = numbers(0, length, dtype=dtype)
        if len(first_rows(uncut, row, numbers(1, length, columns, dtype=dtype), counts=counts)) > 1:
            return
    pytest.skip(f"{dtype}: this machine cuts no sum of these lengths by the number of rows")
