"""Reads the header of a GGUF file: metadata, and where each tensor lies, all checked against the file size."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import mmap
import os
import pathlib
import struct

from gguf import constants
import numpy as np

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import files

Value = int | float | bool | str | np.ndarray | tuple[bytes, ...]

_MAGIC = b"GGUF"
_SCALARS = dict(enumerate("B b H h I i f ?".split())) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
      offset: first byte in the file.
      kind: quantisation.
      shape: the fastest axis last.
    """

    offset: int
    kind: constants.GGMLQuantizationType
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        block, size = constants.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
      path: the file.
      metadata: scalars as Python values, strings as str, arrays of numbers as numpy, arrays of strings as bytes.
      tensors: by name as in the file.
    """

    path: pathlib.Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads the header of the GGUF file `path`.

    Raises:
      WeightsError: the file is missing, of another format or version, truncated, declares more than it holds, or has
        tensors that do not lie one behind the other.
    """
    path = files.existing_file(path, "a GGUF file")
    size = path.stat().st_size
    with open(path, "rb") as file:
        if file.read(4) != _MAGIC or size < 24:
            raise errors.WeightsError(f"{path}: is not a GGUF file ({size} bytes); wanted {_MAGIC!r} at its start")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            try:
                return _parse(path, _Cursor(raw, size))
            except (struct.error, _Malformed, UnicodeDecodeError) as error:
                raise errors.WeightsError(
                    f"{path}: header is damaged or cut off ({error}); fetch the file again"
                ) from None


class _Malformed(Exception):
    """A header that contradicts itself or the size of the file."""


class _Cursor:
    """A place in the mapped header, moving forward."""

    def __init__(self, raw: mmap.mmap, size: int):
        self.raw, self.size, self.at = raw, size, 4

    def number(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + code, self.raw, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def count(self, least_bytes: int) -> int:
        """Returns a declared number of items, each of which takes `least_bytes` or more of the rest of the file."""
        count = self.number("Q")
        if count * least_bytes > self.size - self.at:
            raise _Malformed(f"{count} items declared at byte {self.at}, but the file has {self.size} bytes")
        return count

    def take(self, size: int) -> bytes:
        self.at += size
        return self.raw[self.at - size : self.at]

    def string(self) -> str:
        return self.take(self.count(1)).decode()

    def strings(self, count: int) -> tuple[bytes, ...]:
        found, at, raw, size = [], self.at, self.raw, self.size
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = unpack(raw, at)
            if length > size - at - 8:
                raise _Malformed(f"a string of {length} bytes declared at byte {at}")
            found.append(raw[at + 8 : at + 8 + length])
            at += 8 + length
        self.at = at
        return tuple(found)

    def value(self, code: int) -> Value:
        if code == _STRING:
            return self.string()
        if code in _SCALARS:
            return self.number(_SCALARS[code])
        if code != _ARRAY:
            raise _Malformed(f"value type {code} at byte {self.at}")
        item = self.number("I")
        if item == _STRING:
            return self.strings(self.count(8))
        if item not in _SCALARS:
            raise _Malformed(f"array of type {item} at byte {self.at}")
        dtype = np.dtype("<" + _SCALARS[item])
        return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype)


def _parse(path: pathlib.Path, cursor: _Cursor) -> Header:
    version = cursor.number("I")
    if version not in (2, 3):
        raise _Malformed(f"GGUF version {version}, wanted 2 or 3, little-endian")
    num_tensors, num_values = cursor.count(24), cursor.count(13)
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise _Malformed(f"{key} appears twice")
        metadata[key] = cursor.value(cursor.number("I"))
    if metadata.get("split.count", 1) not in (0, 1):
        raise errors.WeightsError(f"{path}: is one of {metadata['split.count']} parts; join them with llama-gguf-split")
    records = {}
    for _ in range(num_tensors):
        name, dimensions = cursor.string(), cursor.number("I")
        if name in records or not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise _Malformed(f"tensor {name}: appears twice, or has {dimensions} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        records[name] = (shape, cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"general.alignment: got {errors.shown(alignment)}, wanted a power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _stored(name, *record, start, cursor.size) for name, record in records.items()}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != start:
            raise _Malformed(f"tensor {name} begins at byte {tensor.offset}, wanted {start}, behind the one before")
        start = -(-tensor.end // alignment) * alignment
    return Header(path, metadata, tensors)


def _stored(name: str, shape: tuple[int, ...], code: int, offset: int, start: int, size: int) -> StoredTensor:
    try:
        kind = constants.GGMLQuantizationType(code)
    except ValueError:
        raise _Malformed(f"tensor {name}: quantisation {code} is not known to the installed gguf package") from None
    block, _ = constants.GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % block:
        raise _Malformed(f"tensor {name}: rows of {shape[-1]} values do not divide into {kind.name} blocks of {block}")
    tensor = StoredTensor(start + offset, kind, shape)
    if tensor.end > size:
        raise _Malformed(f"tensor {name} ends at byte {tensor.end}, but the file has {size}")
    return tensor
