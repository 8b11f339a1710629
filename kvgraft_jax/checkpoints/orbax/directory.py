"""Checkpoints as DeepMind writes them: an Orbax directory in its flat, stacked or nested layout, read array by array.

The arrays are read with TensorStore, on which Orbax rests: rows of one array at a time, to the host, whatever devices
they were saved from, and without touching Orbax's own state. A stack of layers holds those of one place in the
repeating pattern of six layers: entry g of `attention_type_k` is layer 6 g + k.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import tensorstore

from kvgraft_jax import device_memory, errors, forks, paths
from kvgraft_jax.checkpoints import files
from kvgraft_jax.checkpoints import source as source_lib
from kvgraft_jax.checkpoints.orbax import names as deepmind_names
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.text import tokenizer as tokenizer_lib

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float32), np.dtype(np.float16))
_WRAPPERS = ("params", "rlx_networks", "policy_network", "transformer")
_TOWERS = {
    "SigLiPFromPatches_0",
    "PatchInputVariablePoolingEncoder_0",
    "AudioEncoder",
    "vision_encoder",
    "audio_encoder",
}
_PERIOD = 6
_STACK = re.compile(r"stacked_layers/attention_type_(\d)/(.+)")
_LAYER = re.compile(r"layer_(\d{1,4})/.+")
_MAX_STACK = 1000
_UNFINISHED = ".orbax-checkpoint-tmp"
_DEEPMIND_VOCAB = 262_144
_STORE_ERRORS = (ValueError, OSError, RuntimeError, NotImplementedError)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of the checkpoint, or one layer of a stack.

    Attributes:
      key: its name in the checkpoint, for messages.
      store: the opened array; nothing of it has been read.
      entry: index on the leading axis where layers are stacked, else None.
    """

    key: str
    store: tensorstore.TensorStore
    entry: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array, of one layer where layers are stacked."""
        return tuple(self.store.shape) if self.entry is None else tuple(self.store.shape[1:])


@dataclasses.dataclass(frozen=True)
class _Block:
    """Rows `start` and following of a public tensor, as read last."""

    name: str
    start: int
    rows: np.ndarray


@dataclasses.dataclass
class OrbaxSource:
    """An opened directory; see `source.Source`. It keeps the rows that it read last, a whole number of chunks."""

    origin: str
    config: config_lib.GemmaConfig
    places: Mapping[str, deepmind_names.Place]
    arrays: Mapping[str, StoredArray]
    _block: _Block | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Stored shape of each tensor by public name."""
        return {name: place.shape for name, place in self.places.items() if place.array in self.arrays}

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads rows of one tensor; see `source.Source`."""
        block = self._block
        if block is None or block.name != name or not block.start <= start <= stop <= block.start + len(block.rows):
            self._block = None  # Two large blocks need not lie in memory at once.
            self._block = block = self._read(name, start, stop)
        return block.rows[start - block.start : stop - block.start]

    def _read(self, name: str, start: int, stop: int) -> _Block:
        """Reads the rows `start` to `stop`, and what else lies in the same chunks."""
        place = self.places[name]
        array = self.arrays[place.array]
        view = array.store if array.entry is None else array.store[array.entry]
        view = view if place.part is None else view[place.part]
        view = view.transpose(place.order)
        first, last, each = 0, view.shape[0], 1
        if view.rank > 1:
            each = math.prod(place.shape[:-1]) // view.shape[0]
            chunk = view.chunk_layout.read_chunk.shape[0] or 1
            first = start // each // chunk * chunk
            last = min(-(-stop // (each * chunk)) * chunk, last)
        try:
            rows = view[first:last].read(order="C").result()
        except _STORE_ERRORS as error:
            raise _unreadable(error, f"{self.origin}: {array.key}: cannot be read; truncated? Fetch it again") from None
        return _Block(name, first * each, rows.reshape(-1, place.shape[-1]))


def open_directory(path: str, config_name: str | None = None) -> OrbaxSource:
    """Opens every array in a directory and finds out whose they are; reads no tensor.

    Args:
      path: the directory.
      config_name: states the configuration instead of finding it by the sizes.

    Raises:
      WeightsError: no Orbax checkpoint, a truncated one, or one error that lists every array that is missing,
        unexpected or of the wrong shape.
      ConfigError: the sizes are those of no known configuration.
    """
    forks.use_tensorstore(f"orbax:{path}")
    config = None if config_name is None else configurations.get(config_name)
    directory = paths.absolute(path, "model directory")
    paths.check_plain(directory, "model directory")
    stores = _open_arrays(_checkpoint_directory(directory))
    arrays, is_stacked = _by_layer(directory, stores)
    if any(name.endswith("attn/qkv_einsum") for name in arrays):
        raise errors.WeightsError(
            f"{directory}: holds attn/qkv_einsum, queries, keys and values in one array, which needs as many key/value "
            "heads as query heads; no released Gemma 3 or 4 has that. Use the checkpoint of a released size."
        )
    config = _find_config(directory, arrays) if config is None else config
    if is_stacked and config.layer_kinds != config_lib.repeating_kinds(config.num_layers, _PERIOD):
        raise errors.WeightsError(
            f"{directory}: holds stacked layers, which exist only where every sixth layer is a full one; "
            f"{config.name!r} has another pattern. Use the flat or nested checkpoint of that model."
        )
    table = arrays.get("embedder/input_embedding")
    if table is not None and table.shape[:1] == (_DEEPMIND_VOCAB,) and config.vocab_size > _DEEPMIND_VOCAB:
        config = dataclasses.replace(config, vocab_size=_DEEPMIND_VOCAB)  # Others append rows for image tokens.
    places = deepmind_names.places(config)
    _check(directory, config, places, arrays)
    return OrbaxSource(str(directory), config, places, arrays)


def find_tokenizer(source: OrbaxSource) -> tokenizer_lib.Tokenizer | None:
    """Returns the SentencePiece file inside the checkpoint directory, else the one beside it, else None."""
    directory = pathlib.Path(source.origin)
    for place in (directory, directory.absolute().parent):
        for path in (*sorted(place.glob(f"tokenizer_gemma{source.config.family}*.model")), place / "tokenizer.model"):
            if path.is_file():
                return tokenizer_lib.from_sentencepiece(path.read_bytes(), str(path))
    return None


def _checkpoint_directory(directory: pathlib.Path) -> pathlib.Path:
    """Returns `directory`, or the one in it that holds the arrays (`default`, `state`, ...)."""
    files.check_directory(directory, "that Orbax wrote")
    found = [place for place in (directory, *sorted(directory.iterdir())) if _is_checkpoint(place)]
    unfinished = [place for place in found if _UNFINISHED in place.name]
    if found[:1] == [directory] != unfinished[:1]:
        return directory
    found = [place for place in found if place not in unfinished]
    if unfinished and not found:
        raise errors.WeightsError(
            f"{directory}: holds only {', '.join(place.name for place in unfinished)[:300]}, which Orbax had not "
            "finished to write; save the checkpoint again"
        )
    if len(found) != 1:
        raise errors.WeightsError(
            f"{directory}: {len(found)} directories in it hold an Orbax checkpoint (_METADATA or manifest.ocdbt); "
            "wanted one. Name the directory that holds those files."
        )
    return found[0]


def _is_checkpoint(directory: pathlib.Path) -> bool:
    return any((directory / name).is_file() for name in ("_METADATA", "manifest.ocdbt"))


def _open_arrays(directory: pathlib.Path) -> dict[str, tensorstore.TensorStore]:
    base = {"driver": "file", "path": f"{directory.absolute()}/"}
    is_ocdbt = (directory / "manifest.ocdbt").is_file()
    spec = {"driver": "ocdbt", "base": base} if is_ocdbt else base
    root = "" if is_ocdbt else base["path"]
    opening = {}
    try:
        for key in tensorstore.KvStore.open(spec).result().list().result():
            name, _, last = key.decode().rpartition("/")
            driver = {".zarray": "zarr", "zarr.json": "zarr3"}.get(last)
            if driver and name and _canonical(name) is not None:
                array = {"driver": driver, "kvstore": spec | {"path": f"{root}{name}/"}}
                # A chunk that is not there is an error, not zeros.
                array["fill_missing_data_reads"] = False
                opening[name] = tensorstore.open(array, open=True, read=True)
        stores = {name: future.result() for name, future in sorted(opening.items())}
    except _STORE_ERRORS as error:
        problem = f"{directory}: an array cannot be opened; truncated? Fetch the checkpoint again"
        raise _unreadable(error, problem) from None
    if not stores:
        raise errors.WeightsError(f"{directory}: holds no array of a text decoder; truncated? Fetch it again")
    return stores


def _unreadable(error: Exception, problem: str) -> errors.KVGraftError:
    if device_memory.is_want(error):
        return errors.ResourceError(
            f"{problem.partition(';')[0]}, because memory, threads or file handles ran out: end other programs, or "
            f"raise the limit (ulimit -v, -u, -n). {str(error)[:400]}"
        )
    return errors.WeightsError(f"{problem}. {str(error)[:400]}")


def _canonical(key: str) -> str | None:
    """Returns the name by which `deepmind_names` knows an array; None for arrays of other modalities."""
    parts = re.split("[/.]", key)
    while parts[0] in _WRAPPERS and len(parts) > 1:
        del parts[0]
    if not _TOWERS.isdisjoint(parts):
        return None
    name = "/".join(parts[:-1] if parts[-1] == "w" else parts)
    return None if name.startswith(("embedder/mm_", "embedder/audio_")) else name


def _by_layer(
    directory: pathlib.Path, stores: Mapping[str, tensorstore.TensorStore]
) -> tuple[dict[str, StoredArray], bool]:
    """Returns the arrays by canonical name, stacks taken apart, and whether there were stacks."""
    arrays: dict[str, StoredArray] = {}
    kinds = set()
    for key, store in stores.items():
        name = _canonical(key)
        stack = _STACK.fullmatch(name)
        if stack is None or not store.rank or not 1 <= store.shape[0] <= _MAX_STACK:
            found = {name: StoredArray(key, store)}
        else:
            kinds.add(int(stack[1]))
            found = {
                f"layer_{_PERIOD * entry + int(stack[1])}/{stack[2]}": StoredArray(key, store, entry)
                for entry in range(store.shape[0])
            }
        for name, array in found.items():
            if name in arrays:
                raise errors.WeightsError(f"{directory}: {arrays[name].key} and {key} both hold {name}; wanted one")
            arrays[name] = array
    if kinds and kinds != set(range(_PERIOD)):
        raise errors.WeightsError(
            f"{directory}: holds stacked layers of the attention types {sorted(kinds)}, wanted 0 to {_PERIOD - 1}, a "
            "pattern of six layers. Use the flat or nested checkpoint of that model."
        )
    return arrays, bool(kinds)


def _find_config(directory: pathlib.Path, arrays: Mapping[str, StoredArray]) -> config_lib.GemmaConfig:
    """Finds the one configuration of that family, depth and width."""
    table = arrays.get("embedder/input_embedding")
    if table is None or len(table.shape) != 2:
        some = ", ".join(sorted(array.key for array in arrays.values())[:3])
        raise errors.WeightsError(
            f"{directory}: has no embedder/input_embedding with two axes among its {len(arrays)} arrays ({some}, ...); "
            "wanted a Gemma 3 or 4 as DeepMind publishes them"
        )
    layers = 1 + max((int(match[1]) for match in map(_LAYER.fullmatch, arrays) if match), default=-1)
    family = 4 if any(name.endswith("/skip_scale") for name in arrays) else 3
    found = [
        config
        for config in configurations.CONFIGURATIONS.values()
        if (config.num_layers, config.embed_dim) == (layers, table.shape[1]) and config.layer_scalar == (family == 4)
    ]
    if len(found) != 1:
        names = ", ".join(config.name for config in found or configurations.CONFIGURATIONS.values())
        raise errors.ConfigError(
            f"{directory}: got a Gemma {family} with {layers} layers of width {table.shape[1]}, which is "
            f"{'more than one' if found else 'none'} of {names}; state the one that it is: orbax:DIR?config=NAME"
        )
    return found[0]


def _check(
    directory: pathlib.Path,
    config: config_lib.GemmaConfig,
    places: Mapping[str, deepmind_names.Place],
    arrays: Mapping[str, StoredArray],
) -> None:
    """Raises one `WeightsError` that lists all arrays that are missing, misshapen or unexpected."""
    wanted, optional = (
        {place.array: place.array_shape for place in places.values() if place.is_optional is kind}
        for kind in (False, True)
    )
    labels = {
        name: array.key if array.entry is None else f"{array.key} of layer {name.split('/')[0].removeprefix('layer_')}"
        for name, array in arrays.items()
    }
    problems = source_lib.mismatches(wanted, optional, {name: array.shape for name, array in arrays.items()}, labels)
    problems += [
        f"wrong dtype: {array.key}: got {array.store.dtype.name}, wanted bfloat16 or float32"
        for name, array in arrays.items()
        if (name in wanted or name in optional) and array.store.dtype.numpy_dtype not in _DTYPES
    ]
    if problems:
        raise errors.TensorsError(
            f"{directory}: {len(problems)} array(s) do not fit the configuration {config.name!r}:",
            problems,
            "Use the checkpoint of that model, or state another configuration: orbax:DIR?config=NAME",
        )
