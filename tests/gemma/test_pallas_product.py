"""The Pallas product: a row's bits do not depend on the others in the interpreter; the same comparison for GPUs."""

from __future__ import annotations

import jax
from jax._src.pallas.mosaic_gpu.interpret import params  # jax gives the parameters no public name yet.
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.gemma import pallas_product, products

INTERPRET = params.InterpretGPUParams()


def numbers(seed: int, *shape: int) -> np.ndarray:
    """Returns bfloat16 numbers of both signs and of sizes far apart."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-4, 4, shape))).astype(jnp.bfloat16)


def first_row(count: int, kernel: tuple[np.ndarray, ...], interpret: object) -> np.ndarray:
    """Returns the bits of row 0 of a product of `count` rows; the other rows differ with their number."""
    length = sum(len(chunk) for chunk in kernel)
    x_TxD = np.concatenate([numbers(0, 1, length), numbers(count, count - 1, length)])
    found = jax.jit(lambda x, kernel: pallas_product.product(x, kernel, interpret=interpret))(x_TxD, kernel)
    assert found.dtype == jnp.float32 and found.shape == (count, kernel[0].shape[1])
    return np.asarray(found)[0].view(np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(128,), (96, 70)])
def test_a_row_does_not_depend_on_the_others(sizes):
    kernel = tuple(numbers(seed, size, 130) for seed, size in enumerate(sizes))
    wanted = first_row(1, kernel, INTERPRET)
    for count in (2, 33, 65):
        assert np.array_equal(first_row(count, kernel, INTERPRET), wanted)


@pytest.mark.parametrize("count, sizes, columns", [(1, (64,), 128), (3, (320, 320), 200), (70, (40, 100), 60)])
def test_it_is_close_to_the_exact_product(count, sizes, columns):
    kernel = tuple(numbers(seed, size, columns) for seed, size in enumerate(sizes))
    x_TxD, w_DxF = numbers(9, count, sum(sizes)), np.concatenate(kernel).astype(float)
    found = np.asarray(pallas_product.product(x_TxD, kernel, interpret=INTERPRET))
    exact, bound = x_TxD.astype(float) @ w_DxF, 1e-5 * (np.abs(x_TxD.astype(float)) @ np.abs(w_DxF))
    assert (np.abs(found - exact) <= bound).all()


def test_the_chunks_are_one_loop():
    """Cut where tiles end, a kernel gives the bits that it gives in one piece."""
    w_DxF, x_TxD = numbers(1, 256, 128), numbers(2, 2, 256)
    whole, cut = (
        np.asarray(pallas_product.product(x_TxD, tuple(products.split(w_DxF, 0, sizes)), interpret=INTERPRET))
        for sizes in ((256,), (64, 128, 64))
    )
    assert np.array_equal(whole.view(np.uint32), cut.view(np.uint32))


def test_it_lowers_to_mosaic_gpu_without_a_gpu():
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    traced = jax.jit(pallas_product.product).trace(shape(2, 640), (shape(320, 1024), shape(320, 1024)))
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_it_is_off():
    """`products` does not call it before it has run on a GPU."""
    traced = jax.jit(products.product).trace(numbers(0, 2, 64), (numbers(1, 64, 128),))
    assert "mosaic" not in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "x_TxD, kernel, message",
    [
        (np.zeros((2, 64), np.float32), (np.zeros((64, 8), np.float32),), "got float32, wanted bfloat16"),
        (numbers(0, 2, 64), (np.zeros((64, 8), np.float32),), "got bfloat16, float32, wanted bfloat16"),
        (numbers(0, 2, 64), (numbers(1, 32, 8),), "wanted .* chunks .* that add up to D"),
        (numbers(0, 2, 64), (numbers(1, 32, 8), numbers(1, 32, 9)), "wanted .* chunks"),
        (numbers(0, 2, 64), (), "wanted .* chunks"),
        (numbers(0, 64), (numbers(1, 64, 8),), "wanted .* chunks"),
        (numbers(0, 0, 64), (numbers(1, 64, 8),), "rows: got none"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x_TxD, kernel, message):
    with pytest.raises(errors.ConfigError, match=message):
        pallas_product.product(x_TxD, kernel)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, columns", [((640,), 1024), ((1024, 1024), 640), ((704,), 2816)])
def test_on_a_gpu_a_row_does_not_depend_on_the_others_and_is_close_to_the_exact_one(sizes, columns):
    kernel = tuple(numbers(seed, size, columns) for seed, size in enumerate(sizes))
    wanted = first_row(2, kernel, None)
    for count in (32, 64, 128, 256):
        assert np.array_equal(first_row(count, kernel, None), wanted)
    x_D, w_DxF = numbers(0, 1, sum(sizes))[0].astype(float), np.concatenate(kernel).astype(float)
    assert (np.abs(wanted.view(np.float32) - x_D @ w_DxF) <= 1e-5 * (np.abs(x_D) @ np.abs(w_DxF))).all()
