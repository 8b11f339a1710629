"""Digests: canonical JSON, and SHA-256 of arrays over 1-MiB leaves.

An array's digest is the SHA-256 over a tagged header (dtype, shape) and the SHA-256 of each of its 1-MiB leaves, in
C order and little-endian. Leaves are hashed in parallel (hashlib releases the GIL), so a damaged leaf can be named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import thread as threads  # Not on first use: at interpreter shutdown it cannot be loaded.
import contextlib
import hashlib
import json
import os
import sys
from typing import Any

import numpy as np

LEAF_BYTES = 1 << 20


def canonical_json(document: Any) -> bytes:
    """Returns the one byte string of a JSON document: sorted keys, no spaces, UTF-8.

    Raises:
      ValueError: NaN, an infinity, or a lone surrogate.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def is_unicode(text: str) -> bool:
    """Tells whether the text can be encoded: a lone surrogate cannot, and two of them would look like one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_canonical_json(raw: bytes) -> Any:
    """Returns the document whose canonical JSON is exactly `raw`; the inverse of `canonical_json`.

    Raises:
      ValueError: `raw` is not JSON, names a key twice, or is another spelling of its document.
    """
    try:
        document = parse_json(raw)
        canonical = canonical_json(document)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if canonical != raw:
        raise ValueError("not in canonical form")
    return document


def parse_json(raw: bytes) -> Any:
    """Returns the JSON document in `raw`, in any spelling.

    Raises:
      ValueError: `raw` is not JSON, is nested too deep, or an object in it names a key twice.
    """
    try:
        return json.loads(raw, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def bytes_digest(raw: bytes | memoryview) -> str:
    """Returns the SHA-256 (hex) of bytes."""
    return hashlib.sha256(raw).hexdigest()


def json_digest(document: Any) -> str:
    """Returns the SHA-256 (hex) of the canonical JSON of `document`."""
    return bytes_digest(canonical_json(document))


def array_bytes(array: np.ndarray) -> memoryview:
    """Returns the array's bytes in C order, little-endian, without a copy where the array already lies that way."""
    array = np.ascontiguousarray(array)
    if sys.byteorder == "big" and array.dtype.itemsize > 1:
        array = array.byteswap()
    return memoryview(array.reshape(-1).view(np.uint8))


def leaf_digests(array: np.ndarray) -> list[str]:
    """Returns the SHA-256 (hex) of each 1-MiB leaf of the array's bytes, in order; an empty array has one leaf."""
    raw = array_bytes(array)
    leaves = [raw[i : i + LEAF_BYTES] for i in range(0, max(len(raw), 1), LEAF_BYTES)]
    return [d.hex() for d in in_parallel(_sha256, leaves)]


def combine_leaves(dtype: str, shape: tuple[int, ...], leaves: list[str]) -> str:
    """Returns the array digest that belongs to these leaf digests."""
    return json_digest({"dtype": dtype, "shape": list(shape), "leaves": leaves})


def array_digest(array: np.ndarray) -> str:
    """Returns the SHA-256 (hex) of an array: dtype, shape and every bit of its content."""
    return combine_leaves(array.dtype.name, array.shape, leaf_digests(array))


def file_digest(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 (hex) of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"repeated keys, which stand twice or more: {sorted({k for k in keys if keys.count(k) > 1})}")
    return document


def _sha256(raw: memoryview) -> bytes:
    return hashlib.sha256(raw).digest()


def in_parallel(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Applies a function to every item, in threads where the system lets some start, and returns the results in order.

    Threads cannot start at interpreter shutdown or beyond a limit of the system; then the caller computes.
    """
    items = list(items)
    if len(items) < 2:
        return [function(item) for item in items]
    running: list[futures.Future] = []
    with threads.ThreadPoolExecutor(min(len(items), os.cpu_count() or 1), thread_name_prefix="digest") as pool:
        with contextlib.suppress(RuntimeError):  # Only those of `submit`; those of the function are in its future.
            running += (pool.submit(function, item) for item in items)
        late = [function(item) for item in items[len(running) :]]
        return [future.result() for future in running] + late
