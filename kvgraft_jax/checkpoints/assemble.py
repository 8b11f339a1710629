"""Turns an opened checkpoint into the parameter tree on its device or mesh, row by row, and its content digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math

import jax
from jax import sharding
import numpy as np

from kvgraft_jax import device_memory, errors, progress
from kvgraft_jax import digest as digest_lib
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.gemma import sharding as sharding_lib

_CHUNK_ELEMENTS = 1 << 21
_ALIGNMENT = 64
_PROGRESS_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class Assembled:
    """Parameters on the device, and the digest of their content.

    Attributes:
      params: nested tree as in `gemma.parameters`, every leaf in one dtype.
      digest: SHA-256 (hex) over path, dtype, shape and bytes of every parameter.
    """

    params: parameters_lib.Params
    digest: str


def assemble(source: source_lib.Source, dtype: np.dtype, mesh: sharding.Mesh | None = None) -> Assembled:
    """Loads every parameter of `source.config`.

    Exact: bit-exact where `dtype` holds the stored value, else rounded once to nearest even.

    Args:
      source: an opened checkpoint.
      dtype: dtype of all leaves.
      mesh: over which the parameters are spread, one after the other; None is the default device.

    Raises:
      WeightsError: one error that lists every tensor that is missing, unexpected or of the wrong shape.
      ResourceError: the device has not enough memory; raised before any tensor is read.
    """
    parameters = parameters_lib.parameters(source.config)
    check_tensors(source, parameters)

    def load(parameter: parameters_lib.Parameter) -> tuple[parameters_lib.Leaf, str]:
        if parameter.name == parameters_lib.EMBEDDING_NAME and parameters_lib.HEAD_NAME in source.shapes:
            _check_head(source)
        array = aligned_empty(parameter.shape, dtype)
        _fill(source, parameter, array)
        array.flags.writeable = False
        content = digest_lib.array_digest(array)
        # On a CPU the device array may be a view of this very buffer; nothing writes to it any more.
        chunks = [
            jax.device_put(chunk, sharding_lib.of_parameter(mesh, parameter, chunk.shape)).block_until_ready()
            for chunk in parameter.split(array)
        ]
        return parameter.leaf(chunks), content

    return collect(source.origin, source.config, dtype, mesh, load)


def collect(
    origin: str,
    config: config_lib.GemmaConfig,
    dtype: np.dtype,
    mesh: sharding.Mesh | None,
    load: Callable[[parameters_lib.Parameter], tuple[parameters_lib.Leaf, str]],
) -> Assembled:
    """Returns the tree and digest of what `load` returns (leaf of the tree, array digest) for each parameter.

    Raises:
      ResourceError: the device has not enough memory; raised before the first call of `load`.
    """
    parameters = parameters_lib.parameters(config)
    total = sum(math.prod(parameter.shape) for parameter in parameters) * dtype.itemsize
    needed = sum(
        sharding_lib.share_bytes(shape, dtype, sharding_lib.of_parameter(mesh, parameter, shape))
        for parameter in parameters
        for shape in parameter.chunk_shapes
    )
    device_memory.check(origin, needed, sharding_lib.devices(mesh), "only the parameters", "a smaller model")
    leaves, digests = {}, {}
    is_large, is_terminal = total > _PROGRESS_BYTES, progress.is_terminal()
    if is_large and not is_terminal:
        progress.say(f"kvgraft_jax: loading {origin} ({total / 1e6:.0f} MB)")
    with progress.bar(
        total, description="weights", unit="B", in_thousands=True, delay=1.0, is_shown=is_large and is_terminal
    ) as bar:
        for parameter in parameters:
            leaves[parameter.path], digests[parameter.path] = load(parameter)
            bar.update(math.prod(parameter.shape) * dtype.itemsize)
    return Assembled(parameters_lib.nest(leaves), params_digest(digests))


def params_digest(digests: Mapping[str, str]) -> str:
    """Returns the SHA-256 (hex) of a parameter tree, from the array digest of each path in any order."""
    return digest_lib.json_digest(dict(digests))


def check_tensors(source: source_lib.Source, parameters: tuple[parameters_lib.Parameter, ...]) -> None:
    """Raises one `WeightsError` that lists all tensors that are missing, misshapen or unexpected."""
    wanted = {parameter.name: parameter.stored_shape for parameter in parameters}
    optional = {
        parameters_lib.HEAD_NAME: wanted[parameters_lib.EMBEDDING_NAME],
        **parameters_lib.unused_shapes(source.config),
    }
    problems = source_lib.mismatches(wanted, optional, source.shapes, {})
    if problems:
        raise errors.TensorsError(
            f"{source.origin}: {len(problems)} tensor(s) do not fit the configuration {source.config.name!r}:",
            problems,
            "Use the configuration and the weight files of one and the same export.",
        )


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialised array whose buffer is aligned so that a CPU device can take it over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _fill(source: source_lib.Source, parameter: parameters_lib.Parameter, array: np.ndarray) -> None:
    columns = parameter.stored_shape[-1]
    groups = max(parameter.matrices, 1)
    rows = math.prod(parameter.stored_shape[:-1]) // groups
    for group, part in enumerate(array.reshape(groups, -1)):
        target = part.reshape(columns, rows).T if parameter.matrices else part.reshape(rows, columns)
        for start, stop in _chunks(rows, columns):
            block = source.read_rows(parameter.name, group * rows + start, group * rows + stop)
            if block.dtype != array.dtype:
                block = block.astype(np.float32, copy=False).astype(array.dtype, copy=False)
            target[start:stop] = block


def _check_head(source: source_lib.Source) -> None:
    rows, columns = source.shapes[parameters_lib.EMBEDDING_NAME]
    for start, stop in _chunks(rows, columns):
        head, table = (
            source.read_rows(name, start, stop).astype(np.float32, copy=False)
            for name in (parameters_lib.HEAD_NAME, parameters_lib.EMBEDDING_NAME)
        )
        if not np.array_equal(head.view(np.uint32), table.view(np.uint32)):
            raise errors.WeightsError(
                f"{source.origin}: {parameters_lib.HEAD_NAME} differs from {parameters_lib.EMBEDDING_NAME} in rows "
                f"{start} to {stop}; wanted a tied output head, as in every released Gemma. Export the model again "
                "with tied embeddings."
            )


def _chunks(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_ELEMENTS // columns)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
