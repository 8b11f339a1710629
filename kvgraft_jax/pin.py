"""The pin: the document of everything that decides the bits of a computation, its id, and what differs between two.

An engine writes one, an artifact carries one, and a graft is bit-exact only where both are equal. The document is plain
JSON; its id is the SHA-256 of its canonical form, in which every value stands under its name, so no two documents that
differ anywhere share an id.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import json
import math
import re
from typing import Any

from kvgraft_jax import digest, errors

SCHEMA = "kvgraft/pin/3"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")


class _Missing:
    """The type of `MISSING`."""

    def __repr__(self) -> str:
        return "(absent)"

    def __reduce__(self) -> str:
        return "MISSING"  # One object, in a copy too.


MISSING = _Missing()
"""Stands in a `FieldDifference` for a field that one of the two pins does not have."""


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Pin:
    """What decides the bits, as one immutable JSON document. Equal and hashed by content.

    Attributes:
      canonical: the document as canonical JSON.
    """

    canonical: bytes

    def __init__(self, document: Mapping[str, Any]):
        """Freezes a document; later changes to it do not reach the pin.

        Args:
          document: nested dictionaries with string keys, lists or tuples, strings, booleans, integers, finite floats
            and None; not empty. `SCHEMA` stands under "schema" in the ones that an engine writes.

        Raises:
          ConfigError: names the field that is of another type.
        """
        if not isinstance(document, Mapping) or not document:
            raise errors.ConfigError(f"pin document: got {document!r}, wanted a dictionary with one or more fields")
        try:
            plain = _plain(document, "")
        except RecursionError:
            raise errors.ConfigError("pin document: nested too deep, or containing itself") from None
        object.__setattr__(self, "canonical", digest.canonical_json(plain))

    @property
    def document(self) -> dict[str, Any]:
        """Returns a fresh copy of the document."""
        return json.loads(self.canonical)

    @functools.cached_property
    def id(self) -> str:
        """SHA-256 (hex) of the canonical document."""
        return digest.json_digest(self.document)

    def fields(self) -> dict[str, Any]:
        """Returns all values by dotted name, such as `model.sliding.window` or `cpu[0].model`, in order of names."""
        found: dict[str, Any] = {}
        _flatten(self.document, "", found)
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        rows = [(errors.printable(name), errors.printable(_text(value))) for name, value in self.fields().items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join([f"pin {self.id}", *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def __repr__(self) -> str:
        return f"Pin({self.id})"


def diff(ours: Pin, theirs: Pin) -> tuple[errors.FieldDifference, ...]:
    """Returns the fields in which two pins differ, in order of names; none exactly when the pins are equal.

    Raises:
      InputError: one of them is not a pin.
    """
    for name, given in (("ours", ours), ("theirs", theirs)):
        if not isinstance(given, Pin):
            raise errors.InputError(f"{name}: {errors.mistaken(given, 'Pin')}")
    our_fields, their_fields = ours.fields(), theirs.fields()
    differences = []
    for name in sorted(our_fields.keys() | their_fields.keys()):
        our_value, their_value = our_fields.get(name, MISSING), their_fields.get(name, MISSING)
        if _text(our_value) != _text(their_value):
            differences.append(errors.FieldDifference(name, our_value, their_value))
    return tuple(differences)


def _text(value: Any) -> str:
    """Returns the value as canonical JSON, which tells 1 from 1.0 and from true, where Python's `==` does not."""
    return repr(value) if value is MISSING else digest.canonical_json(value).decode()


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str or not digest.is_unicode(key):
                raise errors.ConfigError(f"pin field {name or 'document'}: got the key {key!r}, wanted Unicode text")
        return {key: _plain(item, _join(name, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if value is None or type(value) is bool or (type(value) is float and math.isfinite(value)):
        return value
    if (type(value) is str and digest.is_unicode(value)) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
        return value
    raise errors.ConfigError(
        f"pin field {name}: got {'an integer beyond 64 bits' if type(value) is int else repr(value)} "
        f"of type {type(value).__name__}, "
        "wanted a dictionary, list, Unicode string, boolean, 64-bit integer, finite float or None"
    )


def _flatten(value: Any, name: str, found: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _flatten(item, _join(name, key), found)
    elif isinstance(value, list) and _holds_dict(value):
        for i, item in enumerate(value):
            _flatten(item, f"{name}[{i}]", found)
    else:
        found[name] = value


def _holds_dict(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_holds_dict, value)))


def _join(name: str, key: str) -> str:
    """Returns a dotted name; a key that could be read as more than one name is quoted, so the name stays unique."""
    part = key if _PLAIN_NAME.fullmatch(key) else json.dumps(key)
    return f"{name}.{part}" if name else part
