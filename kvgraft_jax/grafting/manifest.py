"""The manifest: what an artifact says about itself, its two ids, and the strict reading of one from untrusted bytes.

It names every array with dtype, shape and the SHA-256 of each 1-MiB leaf, and carries the pin and the provenance. Both
ids follow from it alone, so an entry's id is checked before any of its arrays is read or allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import math
import re
from typing import Any, Protocol

from kvgraft_jax import digest, errors
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import config

SCHEMA = "kvgraft/artifact/1"

VISIBLE_ROWS = "visible"
ALL_ROWS = "full"
POLICIES = (VISIBLE_ROWS, ALL_ROWS)
KINDS = (config.SLIDING, config.FULL)
KV_DTYPES = ("bfloat16", "float32")

MAX_PROVENANCE_CHARACTERS = 1 << 20

_ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
_HEX64 = re.compile(r"[0-9a-f]{64}")
_INT64 = 1 << 63


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of an artifact, without its content.

    Attributes:
      dtype: NumPy name.
      shape: sizes.
      leaves: SHA-256 (hex) of each 1-MiB leaf of its bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    leaves: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return _ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def digest(self) -> str:
        """Returns the array digest, as `digest.array_digest` gives it."""
        return digest.combine_leaves(self.dtype, self.shape, list(self.leaves))

    def document(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {"dtype": self.dtype, "shape": list(self.shape), "leaves": list(self.leaves)}


@dataclasses.dataclass(frozen=True)
class StackEntry:
    """One K/V stack of an artifact, without its content; the fields are those of `artifact.KVStack`."""

    kind: str
    layers: tuple[int, ...]
    start: int
    kv: ArrayEntry

    @property
    def dtype(self) -> str:
        """Of the rows."""
        return self.kv.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, 2, S, K, H)."""
        return self.kv.shape

    def document(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {"kind": self.kind, "layers": list(self.layers), "start": self.start, "kv": self.kv.document()}


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What an artifact says about itself. Attributes as in `artifact.Artifact`, with entries in place of arrays."""

    policy: str
    token_ids: ArrayEntry
    stacks: tuple[StackEntry, ...]
    logits: ArrayEntry
    pin: pin_lib.Pin
    provenance: Mapping[str, str | int]

    @functools.cached_property
    def state_digest(self) -> str:
        """SHA-256 (hex) over tokens, policy, stacks, logits and pin; not over the provenance."""
        return digest.json_digest(
            {
                "schema": SCHEMA,
                "policy": self.policy,
                "token_ids": self.token_ids.digest,
                "stacks": [
                    {"kind": stack.kind, "layers": stack.layers, "start": stack.start, "kv": stack.kv.digest}
                    for stack in self.stacks
                ],
                "logits": self.logits.digest,
                "pin": self.pin.id,
            }
        )

    @functools.cached_property
    def artifact_id(self) -> str:
        """SHA-256 (hex) over the state digest and the provenance."""
        return digest.json_digest({"schema": SCHEMA, "state": self.state_digest, "provenance": dict(self.provenance)})

    @property
    def arrays(self) -> dict[str, ArrayEntry]:
        """Returns the entries under the names that the arrays have on disk."""
        stacks = {stack.kind: stack.kv for stack in self.stacks}
        return {"token_ids": self.token_ids, "logits": self.logits, **stacks}

    def document(self) -> dict[str, Any]:
        """Returns the manifest as plain JSON data; `read` is the inverse of its canonical form."""
        return {
            "schema": SCHEMA,
            "policy": self.policy,
            "token_ids": self.token_ids.document(),
            "stacks": [stack.document() for stack in self.stacks],
            "logits": self.logits.document(),
            "pin": self.pin.document,
            "provenance": dict(self.provenance),
        }


class Stack(Protocol):
    """What `check_stack` looks at; a `StackEntry` and an `artifact.KVStack` both have it."""

    kind: str
    layers: tuple[int, ...]
    start: int
    dtype: str
    shape: tuple[int, ...]


def check_stack(stack: Stack) -> None:
    """Raises `CaptureError` unless the stack is a possible one by itself."""
    if stack.kind not in KINDS:
        raise errors.CaptureError(f"stack kind: got {stack.kind!r}, wanted one of {', '.join(KINDS)}")
    layers = stack.layers
    if not layers or any(type(layer) is not int or layer < 0 for layer in layers) or sorted(set(layers)) != [*layers]:
        raise errors.CaptureError(f"{stack.kind} layers: got {layers!r}, wanted layer numbers in rising order")
    if type(stack.start) is not int or stack.start < 0:
        raise errors.CaptureError(f"{stack.kind} start: got {stack.start!r}, wanted a position, 0 or more")
    if stack.dtype not in KV_DTYPES:
        raise errors.CaptureError(f"{stack.kind} dtype: got {stack.dtype}, wanted one of {', '.join(KV_DTYPES)}")
    if len(stack.shape) != 5 or stack.shape[:2] != (len(layers), 2) or min(stack.shape) < 1:
        raise errors.CaptureError(
            f"{stack.kind} kv_Lx2xSxKxH: got shape {stack.shape}, wanted ({len(layers)}, 2, S, K, H), none of them 0"
        )


def check_state(policy: str, length: int, stacks: Iterable[Stack]) -> None:
    """Raises `CaptureError` unless the stacks can together be the K/V state of `length` tokens under `policy`."""
    if policy not in POLICIES:
        raise errors.CaptureError(f"policy: got {policy!r}, wanted one of {', '.join(POLICIES)}")
    stacks = tuple(stacks)
    if length < 1 or not stacks:
        raise errors.CaptureError(f"got {length} token(s) and {len(stacks)} stack(s), wanted one or more of each")
    for stack in stacks:
        check_stack(stack)
        end = stack.start + stack.shape[2]
        if end != length:
            raise errors.CaptureError(
                f"{stack.kind} rows: got positions {stack.start} to {end - 1}, wanted them to end at {length - 1}, "
                f"the last of {length} token(s)"
            )
        if stack.start and (policy == ALL_ROWS or stack.kind == config.FULL):
            raise errors.CaptureError(
                f"{stack.kind} start: got {stack.start}, wanted 0; only sliding layers under policy "
                f"{VISIBLE_ROWS!r} may leave rows out"
            )
    kinds = [stack.kind for stack in stacks]
    if kinds != [kind for kind in KINDS if kind in kinds]:
        raise errors.CaptureError(f"stack kinds: got {kinds}, wanted each at most once, in the order {KINDS}")
    layers = [layer for stack in stacks for layer in stack.layers]
    if len(set(layers)) != len(layers):
        raise errors.CaptureError(f"stack layers: got {sorted(layers)}, wanted no layer in two stacks")


def check_provenance(provenance: Mapping[str, str | int]) -> None:
    """Raises `InputError` unless the provenance is flat: non-empty names to strings or 64-bit integers."""
    if not isinstance(provenance, Mapping):
        raise errors.InputError(f"provenance: got {provenance!r}, wanted a mapping of names to strings or integers")
    if sum(len(str(part)) for item in provenance.items() for part in item) > MAX_PROVENANCE_CHARACTERS:
        raise errors.InputError(
            f"provenance: wanted at most {MAX_PROVENANCE_CHARACTERS:,} characters; name a file instead"
        )
    for key, value in provenance.items():
        if type(key) is not str or not key:
            raise errors.InputError(f"provenance: got the name {key!r}, wanted a string that is not empty")
        if type(value) is not str and not (type(value) is int and -_INT64 <= value < _INT64):
            raise errors.InputError(
                f"provenance {key!r}: got {value!r} of type {type(value).__name__}, wanted a string or a 64-bit integer"
            )
        if not digest.is_unicode(f"{key}{value}"):
            raise errors.InputError(f"provenance {key!r}: got {value!r}, wanted Unicode text without lone surrogates")


def is_id(text: Any) -> bool:
    """Returns whether `text` is written as ids are: 64 lower-case hexadecimal digits."""
    return type(text) is str and _HEX64.fullmatch(text) is not None


def read(raw: bytes, artifact_id: str) -> Manifest:
    """Reads a manifest that may come from anyone.

    Exact: the ids of the result are computed from what was read, never read themselves.

    Args:
      raw: the file's bytes.
      artifact_id: the id under which they were found.

    Raises:
      IntegrityError: names the field that is missing, unknown, of another type or impossible, or says that the
        manifest belongs to another id.
    """
    try:
        manifest = _manifest(digest.parse_canonical_json(raw))
    except _Malformed as error:
        raise errors.IntegrityError(artifact_id, f"manifest.json: {error.field}", error.reason) from None
    except (ValueError, errors.KVGraftError) as error:
        raise errors.IntegrityError(artifact_id, "manifest.json", str(error)) from None
    if manifest.artifact_id != artifact_id:
        raise errors.IntegrityError(artifact_id, "manifest.json", f"describes artifact {manifest.artifact_id}")
    return manifest


class _Malformed(Exception):
    """A manifest field that cannot be used."""

    def __init__(self, field: str, reason: str):
        super().__init__(field, reason)
        self.field = field
        self.reason = reason


def _manifest(value: Any) -> Manifest:
    fields = _fields(value, "document", ("schema", "policy", "token_ids", "stacks", "logits", "pin", "provenance"))
    if fields["schema"] != SCHEMA:
        raise _Malformed("schema", f"got {fields['schema']!r}, wanted {SCHEMA!r}")
    manifest = Manifest(
        policy=fields["policy"],
        token_ids=_array(fields["token_ids"], "token_ids", ("int32",)),
        stacks=tuple(_stack(stack, f"stacks[{i}]") for i, stack in enumerate(_list(fields["stacks"], "stacks"))),
        logits=_array(fields["logits"], "logits", ("float32",)),
        pin=pin_lib.Pin(fields["pin"]),
        provenance=fields["provenance"],
    )
    for name, entry in (("token_ids", manifest.token_ids), ("logits", manifest.logits)):
        if len(entry.shape) != 1:
            raise _Malformed(f"{name}.shape", f"got {list(entry.shape)}, wanted one axis")
    check_state(manifest.policy, manifest.token_ids.shape[0], manifest.stacks)
    check_provenance(manifest.provenance)
    return manifest


def _stack(value: Any, name: str) -> StackEntry:
    fields = _fields(value, name, ("kind", "layers", "start", "kv"))
    layers = tuple(_list(fields["layers"], f"{name}.layers"))
    return StackEntry(fields["kind"], layers, fields["start"], _array(fields["kv"], f"{name}.kv", KV_DTYPES))


def _array(value: Any, name: str, dtypes: tuple[str, ...]) -> ArrayEntry:
    fields = _fields(value, name, ("dtype", "shape", "leaves"))
    if fields["dtype"] not in dtypes:
        raise _Malformed(f"{name}.dtype", f"got {fields['dtype']!r}, wanted {' or '.join(dtypes)}")
    shape = _list(fields["shape"], f"{name}.shape")
    if any(type(size) is not int or not 0 < size < _INT64 for size in shape):
        raise _Malformed(f"{name}.shape", f"got {shape!r}, wanted integers above 0")
    leaves = _list(fields["leaves"], f"{name}.leaves")
    entry = ArrayEntry(fields["dtype"], tuple(shape), tuple(leaves))
    wanted = -(-entry.nbytes // digest.LEAF_BYTES)
    if len(leaves) != wanted or not all(map(is_id, leaves)):
        raise _Malformed(f"{name}.leaves", f"got {len(leaves)}, wanted {wanted} SHA-256 for {entry.nbytes} bytes")
    return entry


def _list(value: Any, name: str) -> list[Any]:
    if type(value) is not list:
        raise _Malformed(name, f"got a {type(value).__name__}, wanted a list")
    return value


def _fields(value: Any, name: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    if type(value) is not dict or set(value) != set(wanted):
        got = sorted(value) if type(value) is dict else type(value).__name__
        raise _Malformed(name, f"got {got}, wanted exactly the fields {sorted(wanted)}")
    return value
