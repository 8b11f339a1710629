"""Checkpoints as a directory of safetensors files, single or sharded, as published on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Collection, Mapping
import dataclasses
import math
import pathlib

import jax.numpy as jnp
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import files
from kvgraft_jax.checkpoints.hf import beside
from kvgraft_jax.checkpoints.hf import config as huggingface_config
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PREFIXES = ("language_model.model.", "model.language_model.", "model.")
_OTHER_MODALITIES = (
    "vision_tower",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "vision_embedder",
)
_IGNORED = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in _OTHER_MODALITIES)
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_MAX_HEADER_BYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
      file: the shard.
      offset: first byte in it.
      size: bytes.
      dtype: code, as in the file.
      shape: the fastest axis last.
    """

    file: pathlib.Path
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SafetensorsSource:
    """An opened directory; see `source.Source`."""

    origin: str
    config: config_lib.GemmaConfig
    tensors: Mapping[str, StoredTensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Stored shape of each tensor by public name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads rows of one tensor; see `source.Source`."""
        tensor = self.tensors[name]
        dtype, columns = _DTYPES[tensor.dtype], tensor.shape[-1]
        row = columns * dtype.itemsize
        raw = files.read_bytes(tensor.file, tensor.offset + start * row, (stop - start) * row)
        return raw.view(dtype.newbyteorder("<") if dtype.kind == "f" else dtype).reshape(stop - start, columns)


def open_directory(directory: pathlib.Path, names: Collection[str]) -> SafetensorsSource:
    """Reads config.json and every header in a directory; no tensor.

    Args:
      directory: where the files lie.
      names: of the files that belong to the model, whether or not all lie in the directory.

    Raises:
      WeightsError: files that are missing, truncated, of another format, or that contradict each other.
      ConfigError: a configuration that this package does not compute.
    """
    config = huggingface_config.read_config(directory)
    tensors: dict[str, StoredTensor] = {}
    for stored_name, tensor in _stored_tensors(directory, names).items():
        name = _public_name(stored_name)
        if name is None:
            continue
        if name in tensors:
            raise errors.WeightsError(f"{directory}: two tensors are called {name} once their prefixes are removed")
        if tensor.dtype not in _DTYPES:
            raise errors.WeightsError(
                f"{tensor.file}: {stored_name}: got dtype {tensor.dtype}, wanted {', '.join(_DTYPES)}"
            )
        tensors[name] = tensor
    return SafetensorsSource(str(directory), config, tensors)


def _public_name(stored_name: str) -> str | None:
    if stored_name.startswith(_IGNORED):
        return None
    if stored_name in _HEADS:
        return parameters_lib.HEAD_NAME
    for prefix in _PREFIXES:
        if stored_name.startswith(prefix):
            return stored_name.removeprefix(prefix)
    return stored_name


def stored_files(directory: pathlib.Path, names: Collection[str]) -> dict[str, set[str] | None]:
    """Returns the files that hold the weights, with the tensors that the index lists for each; None without an index.

    Args:
      directory: where the index lies.
      names: of the files that belong to the model, whether or not they lie in the directory.

    Raises:
      WeightsError: there are no safetensors, index and files contradict each other, or another file would change what
        the model computes.
    """
    listed = {SINGLE: None} if INDEX not in names and SINGLE in names else _listed_files(directory, names)
    beside.check_names(set(names) - listed.keys(), str(directory))
    return listed


def _listed_files(directory: pathlib.Path, names: Collection[str]) -> dict[str, set[str]]:
    if INDEX not in names:
        raise errors.WeightsError(
            f"{directory}: holds neither {SINGLE} nor {INDEX}; "
            "download the safetensors files of the model, or save it with safe_serialization=True"
        )
    weight_map = files.read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise errors.WeightsError(
            f"{directory / INDEX}: weight_map: got {weight_map!r}, wanted tensor names and their files"
        )
    listed: dict[str, set[str]] = {}
    for name, file in sorted(weight_map.items()):
        if pathlib.PurePath(str(file)).name != file:
            raise errors.WeightsError(
                f"{directory / INDEX}: got the file name {file!r}, wanted one in the same directory"
            )
        listed.setdefault(file, set()).add(name)
    if SINGLE in names and listed.keys() != {SINGLE}:
        raise errors.WeightsError(
            f"{directory}: holds {SINGLE} beside {INDEX}, which lists {errors.shown(sorted(listed))}: they may "
            "be two models; remove one of the two"
        )
    return listed


def _stored_tensors(directory: pathlib.Path, names: Collection[str]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file, listed in stored_files(directory, names).items():
        shard = _read_header(files.existing_file(directory / file, f"a shard that {INDEX} lists"))
        if listed is not None and listed != set(shard):
            raise errors.WeightsError(f"{directory / file}: {INDEX} disagrees with it on {sorted(listed ^ set(shard))}")
        tensors.update(shard)
    return tensors


def _read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise errors.WeightsError(
                f"{path}: {size} bytes cannot hold the header of {length} bytes that it declares; "
                "it is truncated or no safetensors file: fetch it again"
            )
        header = files.parse_json(file.read(length), str(path))
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _stored_tensor(path, name, entry, start) for name, entry in header.items()}
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
        if tensor.offset != end:
            raise errors.WeightsError(f"{path}: {name}: starts at byte {tensor.offset}, wanted {end}")
        end += tensor.size
    if end != size:
        raise errors.WeightsError(f"{path}: has {size} bytes, its header declares {end}; truncated? Fetch it again")
    return tensors


def _stored_tensor(path: pathlib.Path, name: str, entry: object, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        is_whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and begin <= end
    except (TypeError, KeyError, ValueError):
        is_whole = False
    if not is_whole:
        raise errors.WeightsError(f"{path}: {name}: got {entry!r}, wanted dtype, shape and data_offsets")
    if dtype in _DTYPES and end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise errors.WeightsError(f"{path}: {name}: {end - begin} bytes do not hold shape {list(shape)} of {dtype}")
    return StoredTensor(path, start + begin, end - begin, dtype, shape)
