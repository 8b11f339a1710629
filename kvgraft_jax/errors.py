"""Every error that kvgraft_jax raises on purpose: what was given, what was wanted, what to do.

All derive from `KVGraftError`. Errors that Python users also expect under a built-in name (`ValueError`,
`LookupError`) derive from that as well, so `except ValueError` keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any


class KVGraftError(Exception):
    """Base class of all errors of this package.

    Text of an artifact, a file or a caller stands in a message as `printable` gives it, so it can neither add lines nor
    reach the terminal as a command. Only the kinds that list things keep their line ends.
    """

    _has_lines = False

    def __str__(self) -> str:
        text = super().__str__()
        return "\n".join(map(printable, text.split("\n"))) if self._has_lines else printable(text)


class KVGraftWarning(UserWarning):
    """Category of this package's warnings: what still works, but hardly as it was meant."""


class ConfigError(KVGraftError, ValueError):
    """A model configuration, shape, dtype or setting that this package does not accept."""


class InputError(KVGraftError, ValueError):
    """Token ids, text or provenance that cannot be used: empty, out of range, of the wrong type."""


class CapacityError(InputError):
    """More tokens than the cache has slots for; raised before any compute."""


class BatchError(InputError):
    """Sequences of one call that cannot be run; raised before any compute.

    Attributes:
      errors: what is wrong, by the index of the sequence.
    """

    _has_lines = True

    def __init__(self, errors: dict[int, KVGraftError]):
        lines = "".join(f"\n  {index}: {error}" for index, error in errors.items())
        super().__init__(f"{len(errors)} sequence(s) cannot be run, by index:{lines}")
        self.errors = errors

    def __reduce__(self):
        return BatchError, (self.errors,)


class ResourceError(KVGraftError):
    """More memory than the device has free; raised before anything is loaded or allocated."""


class WeightsError(KVGraftError):
    """A checkpoint that is missing, truncated, foreign, or does not hold the tensors that the model needs."""


class TensorsError(WeightsError):
    """A checkpoint whose tensors are not those of the configuration; the message lists them, one a line."""

    _has_lines = True

    def __init__(self, found: str, problems: Sequence[str], remedy: str):
        super().__init__("\n".join([printable(found), *(f"  {printable(problem)}" for problem in problems), remedy]))
        self._given = (found, tuple(problems), remedy)

    def __reduce__(self):
        return TensorsError, self._given


class TokenizerError(KVGraftError):
    """Tokenizer files or a chat template that cannot be read, or text that cannot be encoded or rendered."""


class SeamError(TokenizerError):
    """A text cut where the tokenizer merges across the seam, so the parts are not a true prefix and suffix."""


class DeterminismError(KVGraftError):
    """XLA is not running in the configuration on which the exactness claims rest."""

    _has_lines = True


class CaptureError(KVGraftError):
    """A state that must not be deposited: empty, holding NaN or an infinity, or lacking rows of its policy."""


class WindowError(CaptureError):
    """Rows outside the sliding window are needed, but the state or artifact holds only the visible ones."""


class ArtifactNotFound(KVGraftError, LookupError):
    """No artifact of that id in that directory."""


class IntegrityError(KVGraftError):
    """Stored bytes are not the bytes that were deposited.

    Attributes:
      artifact: the artifact id (or path) that was being read.
      field: which file, array or manifest field failed the check.
    """

    def __init__(self, artifact: str, field: str, reason: str):
        super().__init__(f"artifact {artifact}: {field}: {reason}")
        self.artifact = artifact
        self.field = field
        self.reason = reason

    def __reduce__(self):
        return IntegrityError, (self.artifact, self.field, self.reason)


class StorageError(KVGraftError):
    """An artifact that could not be written: disk full, no permission. Nothing of it is left, others are intact."""


@dataclasses.dataclass(frozen=True)
class FieldDifference:
    """One field in which two pins differ. `MISSING` stands for a field that one of them does not have."""

    field: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{printable(self.field)}: {shown(self.ours)} here, {shown(self.theirs)} there"


class PinMismatch(KVGraftError):
    """An artifact made under another model, program or machine than the engine it is grafted into.

    Attributes:
      differences: the fields that differ, as `FieldDifference`s; never empty.
    """

    _has_lines = True

    def __init__(self, artifact_id: str, differences: Sequence[FieldDifference]):
        self.artifact_id = artifact_id
        self.differences = tuple(differences)
        lines = "\n".join(f"  {difference}" for difference in self.differences)
        super().__init__(
            f"artifact {artifact_id} was made under another pin and would not be bit-exact here. "
            f"{len(self.differences)} field(s) differ (engine here, artifact there):\n{lines}\n"
            "Deposit the text again with this engine, or build an engine with the artifact's settings."
        )

    def __reduce__(self):
        return PinMismatch, (self.artifact_id, self.differences)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that differ."""
        return tuple(difference.field for difference in self.differences)


_OF_ANOTHER_KIND = {
    ("State", "Artifact"): "engine.capture(state) gives one; a state goes on with engine.extend or engine.generate",
    ("Artifact", "State"): "engine.graft(artifact) gives one; engine.verify(artifact) computes it anew",
    ("Engine", "Pin"): "engine.pin is one",
    ("Artifact", "Pin"): "artifact.pin is one",
    ("State", "Pin"): "engine.pin is that of its states",
    ("Model", "Pin"): "Engine(model).pin is one",
    ("Pin", "Engine"): "an engine is made from a model: Engine(load_model(uri))",
    ("str", "Model"): "load_model(uri) gives one",
    ("Engine", "Model"): "engine.model is one",
    ("str", "Artifact"): "load_artifact(directory, artifact_id) gives one",
    ("State", "a list of int"): "state.token_ids is one; engine.extend(state, token_ids) goes on after a state",
    ("Artifact", "a list of int"): (
        "artifact.token_ids is one; engine.graft(artifact) restores it without reading the tokens again"
    ),
}


def mistaken(value: Any, wanted: str) -> str:
    """Returns what a message says where an argument is of another kind than `wanted`, with the call that was meant."""
    kind = type(value).__name__
    hint = _OF_ANOTHER_KIND.get((kind, wanted))
    article = "an" if kind[:1] in "AEIOUaeiou" else "a"
    name = wanted if wanted.startswith("a ") else f"{'an' if wanted[0] in 'AEIOU' else 'a'} {wanted}"
    return f"got {article} {kind}, wanted {name}{f'; {hint}' if hint else ''}"


def shown(value: Any, limit: int = 96) -> str:
    """Returns `value` as it stands in a message: its repr, cut to `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # `repr` raises for very large integers.
        text = f"a {type(value).__name__} that is too long to be written out"
    text = printable(text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str) -> str:
    """Returns the text in one line: line ends, escape codes and whatever else does not print stand as escapes."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
