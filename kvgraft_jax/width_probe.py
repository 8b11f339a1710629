"""The width probe: whether this machine gives a row the same bits, however many rows it computes together with it.

`gemma.products` fixes the order of every sum, but how a library computes a product is measured, not promised. So an
engine asks here first. Each operation of the model whose sums or approximations a library could choose by shape runs
with its true lengths over a ladder of row counts, and the float32 results before any rounding are compared. What was
found is remembered for the machine, the compiled library, the flags and the lowered operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import math
import sys
import warnings

import jax
import numpy as np

from kvgraft_jax import determinism, digest, errors, host_memory, remembered
from kvgraft_jax.gemma import attention as attention_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import layers, products
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.runtime import step as step_lib

LADDER = (2, 3, 4, 8, 10, 16, 32, 33, 64, 128, 256)
"""The row counts that are always compared: below, at and above the tiles of known kernels, and odd ones."""

COLUMNS = {"cpu": 4096}
"""The most output columns of a product that are computed, by platform; every column where there is no entry."""

FEW = (2, 3, 33, 256)
"""Those of them at which sums and the like are compared, whose code takes longest to compile."""

_PERIOD = 7  # Rows repeat after this many, so each one stands at many places of a kernel's tiles of 2, 4, 6 or 8.
_ELEMENTS = 1 << 28  # Of the operands of one program, at most, unless a single operation has more.


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the probe found.

    Attributes:
      agrees: whether every row had the same bits at every number of rows.
      disagreement: the first difference in words: which operation, which numbers of rows; None if there was none.
    """

    agrees: bool
    disagreement: str | None = None


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An operation on M rows.

    Attributes:
      name: in words.
      apply: (rows, *others) -> float32 array with the M rows on the same axis.
      row_shape: shape of a single row.
      others: shapes of the other operands, which are the same for every M.
      dtype: of all operands.
      axis: where M stands in the shape of the rows.
    """

    name: str
    apply: Callable[..., jax.Array]
    row_shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    dtype: str
    axis: int = 0

    @property
    def size(self) -> int:
        """Returns the number of elements of the operands that do not depend on M."""
        return sum(math.prod(shape) for shape in (self.row_shape, *self.others))

    def document(self) -> list[object]:
        """Returns the operation as plain JSON data, with its function by name."""
        function = f"{self.apply.__module__}.{self.apply.__qualname__}"
        others = [list(shape) for shape in self.others]
        return [self.name, function, list(self.row_shape), others, self.dtype, self.axis]


def settle(
    config: step_lib.StepConfig, device: jax.Device, wanted: tuple[int, ...]
) -> tuple[step_lib.StepConfig, tuple[int, ...]]:
    """Returns the configuration and the widths to use: those that are wanted where `check` agrees.

    Else the middle one alone is used, and the configuration names it; a `KVGraftWarning` says so where there were more.
    """
    verdict = check(config, device, wanted)
    if verdict.agrees:
        return config, wanted
    width = wanted[len(wanted) // 2]
    if len(wanted) > 1:
        warnings.warn(
            f"shapes: got {wanted}, but on this machine a token's bits depend on the width of its step "
            f"({verdict.disagreement}), so all steps are {width} lanes wide and the pin says so; give one width of "
            "your own, as in shapes=(64,), to choose another",
            errors.KVGraftWarning,
            stacklevel=4,
        )
    return dataclasses.replace(config, width=width), (width,)


def check(config: step_lib.StepConfig, device: jax.Device, widths: Iterable[int]) -> Verdict:
    """Returns whether the operations of a model give each row the same bits for every number of rows.

    Products are compared for each distinct pair of summed and output lengths, also the two of attention, and the sums,
    exponentials and activations at the model's lengths. On a CPU only the first `COLUMNS` columns of a product are
    computed: measured with columns up to 262,144, its library chooses a kernel without regard to columns further on.
    On other platforms all of them are. Sums, exponentials and activations are compared at `FEW` numbers of rows.
    The mesh of the configuration has no part in it.

    Args:
      config: of the engine; its model, dtype and K/V block are read.
      device: that computes.
      widths: the numbers of rows that the engine uses, compared beside those of `LADDER`.
    """
    environment = digest.canonical_json(determinism.environment(device))
    own = tuple(widths)
    ladder, few = (tuple(sorted({*known, *own})) for known in (LADDER, FEW))
    found = _operations(config.model, config.dtype, config.kv_block, COLUMNS.get(device.platform))
    operations = tuple(sorted(dict.fromkeys(found), key=lambda operation: operation.size))
    return _check(operations, ladder, few, device, environment)


@functools.lru_cache(maxsize=64)
def _check(
    operations: tuple[_Operation, ...],
    ladder: tuple[int, ...],
    few: tuple[int, ...],
    device: jax.Device,
    environment: bytes,
) -> Verdict:
    """Returns what `check` does, once per process."""
    documents = [operation.document() for operation in operations]
    key = ["widths", digest.parse_json(environment), _code_digest(), documents, [list(ladder), list(few)]]
    known = _read(remembered.get(key))
    if known is None:
        known = _measure(operations, ladder, few, device)
        remembered.put(key, dataclasses.asdict(known))
        host_memory.trim()  # Compilation is over.
    return known


def _code_digest() -> str:
    """Returns the SHA-256 of the modules that the operations are in: other code is measured again."""
    modules = (products, attention_lib, layers, sys.modules[__name__])
    return digest.json_digest([digest.bytes_digest(each.__loader__.get_data(each.__file__)) for each in modules])


def _read(entry: object) -> Verdict | None:
    """Returns a remembered verdict; None for anything else."""
    match entry:
        case {"agrees": True as agrees, "disagreement": None as words} | {
            "agrees": False as agrees,
            "disagreement": str() as words,
        }:
            return Verdict(agrees, words)
    return None


def _operations(model: config_lib.GemmaConfig, dtype: str, kv_block: int, columns: int | None) -> Iterator[_Operation]:
    """Yields the operations of a model; some more than once."""
    for parameter in parameters_lib.parameters(model):
        if parameter.summed:
            yield _product_of(parameter, dtype, columns)
    N, D = model.num_heads, model.embed_dim
    squares, activated = {(D,)}, {model.feedforward_dim(layer) for layer in range(model.num_layers)}
    for kind in model.kinds:
        K, H = kind.attention.num_kv_heads, kind.attention.head_dim
        G, S = N // K, kv_block
        squares |= {(N, H), (K, H)}
        heads = f"of {K} x {G} heads of {H}"
        yield _Operation(f"queries times keys {heads}", attention_lib.query_key, (K, G, H), ((S, K, H),), dtype, 2)
        yield _Operation(f"weighted values {heads}", attention_lib.weighted_values, (K, G, S), ((S, K, H),), dtype, 2)
        yield _elementwise("sum", products.row_sum, (K, G, S), 2)
        for length in (S, 1):
            yield _elementwise("exponential", products.exp, (K, G, length), 2)
    if model.per_layer is not None:
        squares.add((model.num_layers, model.per_layer.dim))
    for shape in sorted(squares):
        yield _elementwise("sum of squares", _sum_of_squares, shape)
    if model.experts is not None:
        yield _elementwise("softmax", products.softmax, (model.experts.num_experts,))
        yield _elementwise("sum", products.row_sum, (model.experts.top_k,))
        activated.add(model.experts.hidden_dim)
    for length in sorted(activated):
        yield _elementwise("activation", layers.gelu, (length,))


def _elementwise(
    name: str, apply: Callable[[jax.Array], jax.Array], row_shape: tuple[int, ...], axis: int = 0
) -> _Operation:
    """Returns an operation in float32 on rows of their own."""
    return _Operation(f"{name} over {row_shape[-1]}", apply, row_shape, (), "float32", axis)


def _product_of(parameter: parameters_lib.Parameter, dtype: str, columns: int | None) -> _Operation:
    """Returns the product with a parameter, whose output axes count as one and end after `columns`."""
    summed = [math.prod(shape[a] for a in parameter.summed) for shape in parameter.chunk_shapes]
    outputs = math.prod(parameter.shape) // math.prod(parameter.shape[a] for a in parameter.summed)
    if parameter.matrices:
        outputs //= parameter.matrices
    outputs = min(outputs, columns or outputs)
    length, is_table = sum(summed), parameter.summed[0] != 0 and not parameter.matrices
    if is_table:
        kernel, apply = tuple((outputs, size) for size in summed), _product_with_rows
    else:
        kernel, apply = tuple((size, outputs) for size in summed), _product
    return _Operation(f"product of {length} with {outputs} columns", apply, (length,), kernel, dtype)


def _product(x_TxD: jax.Array, *kernel: jax.Array) -> jax.Array:
    return products.product(x_TxD, kernel)


def _product_with_rows(x_TxD: jax.Array, *table: jax.Array) -> jax.Array:
    return products.product_with_rows(x_TxD, table)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    """Sums squares as a norm does, where a library could fuse the square into the sum."""
    return products.row_sum(jax.lax.square(x))


def _measure(
    operations: tuple[_Operation, ...], ladder: tuple[int, ...], few: tuple[int, ...], device: jax.Device
) -> Verdict:
    groups: list[list[_Operation]] = [[]]
    for operation in operations:
        if sum(other.size for other in groups[-1]) + operation.size > _ELEMENTS:
            groups.append([])
        groups[-1].append(operation)
    for group in groups:
        disagreement = _disagreement(group, ladder, few, device)
        if disagreement is not None:
            return Verdict(False, disagreement)
    return Verdict(True)


def _disagreement(
    operations: list[_Operation], ladder: tuple[int, ...], few: tuple[int, ...], device: jax.Device
) -> str | None:
    """Returns the first difference between results for the same row, in words; None if there is none.

    All operations are one program for each number of rows, since a program takes longer to compile than to run.
    """
    rng = np.random.default_rng(0)
    bases = [_random(rng, (_PERIOD, *operation.row_shape), operation.dtype) for operation in operations]
    others = [[_random(rng, shape, operation.dtype) for shape in operation.others] for operation in operations]
    others = jax.device_put(others, device)
    known: list[dict[int, tuple[int, np.ndarray]]] = [{} for _ in operations]
    for count in ladder:
        asked = [index for index, operation in enumerate(operations) if operation.others or count in few]
        rows = jax.device_put([_rows(bases[index], count, operations[index].axis) for index in asked], device)
        apply = [operations[index].apply for index in asked]
        compute = jax.jit(lambda given, apply=apply: [each(*mine) for each, mine in zip(apply, given, strict=True)])
        found = jax.device_get(compute([[mine, *others[index]] for mine, index in zip(rows, asked, strict=True)]))
        for index, result in zip(asked, found, strict=True):
            operation, seen = operations[index], known[index]
            bits = np.moveaxis(result, operation.axis, 0).view(np.uint32)
            for row in range(count):
                first, wanted = seen.setdefault(row % _PERIOD, (count, bits[row]))
                if not np.array_equal(bits[row], wanted):
                    return (
                        f"{operation.name} in {operation.dtype}: row {row} of {count} has other bits than the same row "
                        f"has as row {row % _PERIOD} of {first}"
                    )
    return None


def _rows(base: np.ndarray, count: int, axis: int) -> np.ndarray:
    """Returns `count` rows, which are those of `base` over and over, on the given axis."""
    return np.ascontiguousarray(np.moveaxis(base[np.arange(count) % len(base)], 0, axis))


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns random numbers of both signs and of eight exponents, 2^-7 to 2, whose sums show another order."""
    size = np.dtype(dtype).itemsize
    bits = rng.integers(0, 1 << 8 * size, shape, np.dtype(f"uint{8 * size}"))
    kept, exponent = (0x83FF, 0x3C00) if size == 2 else (0x83FF_FFFF, 0x3C00_0000)
    return ((bits & kept) | exponent).astype(bits.dtype).view(dtype)
