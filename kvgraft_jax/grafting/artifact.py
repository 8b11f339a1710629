"""The artifact: the frozen K/V state of a text, its next-token logits, the pin they were made under, and two ids.

It holds NumPy arrays on the host that nobody can write to; `storage` puts them on disk, a graft copies them to a
device.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
import types
from typing import Any

import ml_dtypes
import numpy as np

from kvgraft_jax import digest, errors
from kvgraft_jax import pin as pin_lib
from kvgraft_jax import token_ids as token_ids_lib
from kvgraft_jax.grafting import manifest as manifest_lib


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KVStack:
    """The rows of the layers that own keys and values of one shape class.

    Attributes:
      kind: "sliding" or "full", the attention kind of these layers.
      layers: their numbers in the model, in rising order.
      start: position of the first row; row s holds position start + s.
      kv_Lx2xSxKxH: bfloat16 or float32; keys after rotary encoding at [:, 0], values at [:, 1]. Read-only.

    Raises:
      CaptureError: fields that do not belong together, another dtype, NaN or an infinity.
    """

    kind: str
    layers: tuple[int, ...]
    start: int
    kv_Lx2xSxKxH: np.ndarray

    def __post_init__(self):
        kv_Lx2xSxKxH = np.asarray(self.kv_Lx2xSxKxH)
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "kv_Lx2xSxKxH", kv_Lx2xSxKxH)
        manifest_lib.check_stack(self)
        object.__setattr__(self, "kv_Lx2xSxKxH", _frozen(kv_Lx2xSxKxH))
        where = _first_not_finite(self.kv_Lx2xSxKxH)
        if where is not None:
            layer, side, row = self.layers[where[0]], ("key", "value")[where[1]], self.start + where[2]
            raise errors.CaptureError(
                f"{self.kind} kv_Lx2xSxKxH: {_spelt(self.kv_Lx2xSxKxH[where])} in a {side} of layer {layer}, "
                f"position {row}; wanted finite values"
            )

    @property
    def dtype(self) -> str:
        """Of the rows; another name for a dtype of another byte order, which is refused."""
        dtype = self.kv_Lx2xSxKxH.dtype
        return dtype.name if dtype.isnative else f"{dtype.name} of another byte order"

    @property
    def shape(self) -> tuple[int, ...]:
        """(L, 2, S, K, H)."""
        return self.kv_Lx2xSxKxH.shape

    @property
    def positions(self) -> range:
        """Positions of the rows."""
        return range(self.start, self.start + self.shape[2])

    def __reduce__(self):
        return KVStack, (self.kind, self.layers, self.start, self.kv_Lx2xSxKxH)

    def __repr__(self) -> str:
        return f"KVStack({self.kind}, layers {self.layers}, start {self.start}, {self.dtype}{list(self.shape)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Artifact:
    """A deposit: what a frozen model computed for some tokens, byte for byte. Equal and hashed by `artifact_id`.

    Arrays are copied onto immutable memory; no source, and no flag, can change them afterwards.

    Attributes:
      policy: "visible" (sliding layers keep the rows that a next token can see) or "full" (every row).
      token_ids: the tokens at positions 0, 1, ...; also given as an array of integers.
      stacks: one `KVStack` per shape class, sliding before full (put into that order here).
      logits_V: float32, the logits of the token after the last. Read-only.
      pin: what decided the bits.
      provenance: flat notes of the depositor, names to strings or integers; part of `artifact_id`.

    Raises:
      CaptureError: empty, a value that is NaN or infinite, or stacks that are not the state of these tokens.
      InputError: token ids or provenance of another form.
    """

    policy: str
    token_ids: tuple[int, ...]
    stacks: tuple[KVStack, ...]
    logits_V: np.ndarray
    pin: pin_lib.Pin
    provenance: Mapping[str, str | int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        manifest_lib.check_provenance(self.provenance)
        if not isinstance(self.pin, pin_lib.Pin):
            raise errors.InputError(f"pin: got a {type(self.pin).__name__}, wanted a Pin")
        token_ids = token_ids_lib.check(self.token_ids, token_ids_lib.MAX_VOCAB_SIZE)
        stacks = tuple(self.stacks)
        if not all(isinstance(stack, KVStack) for stack in stacks):
            raise errors.CaptureError(f"stacks: got {stacks!r}, wanted KVStacks")
        stacks = tuple(sorted(stacks, key=lambda stack: manifest_lib.KINDS.index(stack.kind)))
        manifest_lib.check_state(self.policy, len(token_ids), stacks)
        logits_V = np.asarray(self.logits_V)
        if logits_V.dtype != np.float32 or logits_V.ndim != 1 or not logits_V.size:
            raise errors.CaptureError(f"logits_V: got {logits_V.dtype}{list(logits_V.shape)}, wanted float32[V]")
        logits_V = _frozen(logits_V)
        where = _first_not_finite(logits_V)
        if where is not None:
            raise errors.CaptureError(
                f"logits_V: {_spelt(logits_V[where])} at token id {where[0]}; wanted finite values"
            )
        object.__setattr__(self, "token_ids", token_ids)
        object.__setattr__(self, "stacks", stacks)
        object.__setattr__(self, "logits_V", logits_V)
        object.__setattr__(self, "provenance", types.MappingProxyType(dict(self.provenance)))

    def __reduce__(self):
        return Artifact, (self.policy, self.token_ids, self.stacks, self.logits_V, self.pin, dict(self.provenance))

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def positions(self) -> range:
        """Positions of the tokens: 0 to length - 1, always."""
        return range(self.length)

    @functools.cached_property
    def token_ids_S(self) -> np.ndarray:
        """Returns the token ids as a read-only int32[S]."""
        return _frozen(np.array(self.token_ids, np.int32))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return 4 * self.length + self.logits_V.nbytes + sum(stack.kv_Lx2xSxKxH.nbytes for stack in self.stacks)

    @functools.cached_property
    def description(self) -> manifest_lib.Manifest:
        """Returns the manifest, typed; hashes every array the first time."""
        return manifest_lib.Manifest(
            policy=self.policy,
            token_ids=_entry(self.token_ids_S),
            stacks=tuple(
                manifest_lib.StackEntry(stack.kind, stack.layers, stack.start, _entry(stack.kv_Lx2xSxKxH))
                for stack in self.stacks
            ),
            logits=_entry(self.logits_V),
            pin=self.pin,
            provenance=self.provenance,
        )

    @property
    def manifest(self) -> dict[str, Any]:
        """Returns the manifest as plain JSON data."""
        return self.description.document()

    @property
    def state_digest(self) -> str:
        """SHA-256 (hex) of tokens, policy, stacks, logits and pin.

        Exact: equal exactly when all of these are equal bit for bit; no version, time or path has a part in it.
        """
        return self.description.state_digest

    @property
    def artifact_id(self) -> str:
        """SHA-256 (hex) of `state_digest` and the provenance."""
        return self.description.artifact_id

    def __eq__(self, other: object) -> bool:
        return self.artifact_id == other.artifact_id if isinstance(other, Artifact) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.artifact_id)

    def __repr__(self) -> str:
        return f"Artifact({self.artifact_id}, {self.length} tokens, {self.policy})"

    def __str__(self) -> str:
        rows = [
            ("tokens", f"{self.length}, positions 0 to {self.length - 1}"),
            ("policy", self.policy),
            ("size", f"{self.nbytes:,} bytes"),
        ]
        for stack in self.stacks:
            held = f"positions {stack.positions[0]} to {stack.positions[-1]}"
            rows.append((stack.kind, f"{len(stack.layers)} layer(s), {held}, {stack.dtype}{list(stack.shape)}"))
        rows += [("logits", f"float32[{len(self.logits_V)}]"), ("state", self.state_digest), ("pin", self.pin.id)]
        rows += [
            (errors.printable(f"provenance {key}"), errors.printable(str(value)))
            for key, value in sorted(self.provenance.items())
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join([f"artifact {self.artifact_id}", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _entry(array: np.ndarray) -> manifest_lib.ArrayEntry:
    return manifest_lib.ArrayEntry(array.dtype.name, array.shape, tuple(digest.leaf_digests(array)))


def _frozen(array: np.ndarray) -> np.ndarray:
    """Returns the array on memory that nobody can ever write to: a copy, unless it stands on such memory already."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if isinstance(owner.base, bytes) and array.flags.c_contiguous:
        return array
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def _first_not_finite(array: np.ndarray) -> tuple[int, ...] | None:
    """Returns the index of the first NaN or infinity: as integers, the patterns from infinity on, with either sign."""
    signed, unsigned, infinity = (
        (np.int16, np.uint16, 0x7F80) if array.dtype == ml_dtypes.bfloat16 else (np.int32, np.uint32, 0x7F800000)
    )
    sign = np.iinfo(signed).max + 1
    bits = array.view(unsigned)
    if array.view(signed).max() < infinity and bits.max() < infinity + sign:
        return None
    return tuple(int(axis) for axis in np.argwhere((bits & (sign - 1)) >= infinity)[0])


def _spelt(value: np.floating) -> str:
    return "NaN" if math.isnan(float(value)) else f"{float(value)}inity"
