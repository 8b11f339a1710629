"""Reads the named values that describe a model, and raises everything that is wrong with them as one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvgraft_jax import errors


class Fields:
    """The values of one document, each of which must be read or named as harmless: any other would change the model.

    A reader that meets a wrong value notes it and returns a stand-in, so that all are found; call `check` before the
    result is used.

    Attributes:
      values: the document.
      around: the document of which it is a part, which must not say otherwise what is read here.
      problems: what is wrong so far.
    """

    def __init__(self, values: Mapping[str, object], around: Mapping[str, object] | None = None):
        self.values = values
        self.around = around or {}
        self.problems: list[str] = []
        self._known: set[str] = set()
        self._ignored: set[str] = set()
        self._reserved: set[str] = set()
        self._used: dict[str, object] = {}

    def take(self, key: str, default: object = None) -> object:
        """Returns the value; `default` where it is missing or null."""
        self._known.add(key)
        value = self.values.get(key)
        self._used[key] = default if value is None else value
        return self._used[key]

    def wrong(self, key: str, value: object, wanted: str) -> None:
        """Notes a value that is not accepted."""
        self.problems.append(f"{key}: got {errors.shown(value)}, wanted {wanted}")

    def integer(self, key: str, default: int | None = None, may_be_null: bool = False) -> int:
        """Returns a whole number; without a default it must be there."""
        return self._number(key, default, (int,), "a whole number", may_be_null)

    def real(self, key: str, default: float | None = None) -> float:
        """Returns a number; without a default it must be there."""
        return float(self._number(key, default, (int, float), "a number", False))

    def positive(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0; without a default it must be there."""
        value = self.real(key, default)
        if not value > 0:
            self.wrong(key, value, "a number above 0")
            return 1.0
        return value

    def flag(self, key: str) -> bool:
        """Reads true or false; false where it is missing or null."""
        value = self.take(key, False)
        if not isinstance(value, bool):
            self.wrong(key, value, "true or false")
        return value is True

    def only(self, key: str, *accepted: object) -> None:
        """Notes any other value than these; missing is accepted."""
        self._known.add(key)
        value = self._used[key] = self.values.get(key, accepted[0])
        if isinstance(value, np.ndarray) or value not in accepted:
            self.wrong(key, value, " or ".join(map(repr, accepted)))

    def ignore(self, keys: Iterable[str]) -> None:
        """Names keys that do not change the numbers."""
        self._ignored.update(keys)

    def reserve(self, keys: Iterable[str]) -> None:
        """Names keys that, read or not, only this part may hold."""
        self._reserved.update(keys)

    def check(self) -> None:
        """Raises one `ConfigError` with all wrong values, missing ones, and keys that were neither read nor ignored."""
        unknown = [
            f"unknown key {key} = {errors.shown(value)}"
            for key, value in self.values.items()
            if key not in self._known | self._ignored and value is not None
        ]
        unknown += [
            f"{key} = {errors.shown(value)} beside text_config, wanted inside"
            for key, value in self.around.items()
            if key in self._known | self._reserved and value is not None and value != self._used.get(key)
        ]
        if unknown or self.problems:
            raise errors.ConfigError(
                "would not give the numbers that the model was made for: " + "; ".join(unknown + self.problems)
            )

    def _number(
        self, key: str, default: float | None, kinds: tuple[type, ...], wanted: str, may_be_null: bool
    ) -> int | float:
        self._known.add(key)
        if key not in self.values or (may_be_null and self.values[key] is None):
            if default is None:
                self.problems.append(f"missing {key}")
            self._used[key] = default
            return 1 if default is None else default
        value = self._used[key] = self.values[key]
        if type(value) not in kinds or (type(value) is int and abs(value) >= 1 << 63):
            self.wrong(key, value, wanted)
            return 1
        return value
