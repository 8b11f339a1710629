"""What a Gemma text decoder is made of, as frozen data: the one description that model, cache, loaders and pin share.

The two attention kinds (sliding window, full) may differ in head width, key/value heads and rotary encoding; which
layer is of which kind is a tuple. Fields follow GEMMA's public configuration files; the sizes are in `configurations`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kvgraft_jax import errors

SLIDING = "sliding"
FULL = "full"

MAX_LAYERS = 1024

# Fields that decide which tokens a person feeds or keeps, never a number that the model computes.
_NO_NUMBERS = ("name", "max_positions", "pad_id", "bos_id", "stop_ids", "suppress_ids")


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary encoding of one attention kind.

    Attributes:
      base: theta; the frequency of pair i is base^(-2i/H) / scale.
      scale: linear position scaling; every frequency is divided by it.
      fraction: share of the R pairs that rotate, the first ones; the others have frequency 0 (proportional RoPE).
    """

    base: float
    scale: float = 1.0
    fraction: float = 1.0

    def __post_init__(self):
        if not 1 < self.base < math.inf:
            raise errors.ConfigError(f"rotary base: got {self.base}, wanted a finite number above 1")
        if not 0 < self.scale < math.inf:
            raise errors.ConfigError(f"rotary scale: got {self.scale}, wanted a finite number above 0")
        if not 0 < self.fraction <= 1:
            raise errors.ConfigError(f"rotary fraction: got {self.fraction}, wanted a number above 0, at most 1")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """One attention kind.

    Attributes:
      num_kv_heads: K, key/value heads.
      head_dim: H, head width; even.
      rotary: rotary encoding of queries and keys.
      window: keys that a query sees, itself included; None means all earlier ones.
      values_are_keys: values are the raw key projection, before norm and rotary encoding; no value projection.
    """

    num_kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    window: int | None = None
    values_are_keys: bool = False

    def __post_init__(self):
        if self.head_dim <= 0 or self.head_dim % 2:
            raise errors.ConfigError(f"head_dim: got {self.head_dim}, wanted an even number above 0")
        if self.num_kv_heads <= 0:
            raise errors.ConfigError(f"num_kv_heads: got {self.num_kv_heads}, wanted 1 or more")
        if self.window is not None and not 2 <= self.window < 1 << 31:
            raise errors.ConfigError(f"window: got {self.window}, wanted 2 to {(1 << 31) - 1}, or None")


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The layers of one attention kind.

    Attributes:
      name: SLIDING or FULL.
      attention: what they have in common.
      layers: numbers of those that own keys and values, rising.
    """

    name: str
    attention: AttentionConfig
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Routed experts beside the dense feed-forward layer.

    Attributes:
      num_experts: E.
      top_k: experts that a token goes through.
      hidden_dim: F, feed-forward width of one expert.
    """

    num_experts: int
    top_k: int
    hidden_dim: int

    def __post_init__(self):
        if not 0 < self.top_k <= self.num_experts or self.hidden_dim <= 0:
            raise errors.ConfigError(
                f"experts: got {self.top_k} of {self.num_experts} with width {self.hidden_dim}, wanted 1 to all of them"
            )


@dataclasses.dataclass(frozen=True)
class PerLayerConfig:
    """Embeddings that every layer looks up for itself.

    Attributes:
      vocab_size: rows of the table; as many as the model has tokens, or more.
      dim: P, width per layer.
    """

    vocab_size: int
    dim: int

    def __post_init__(self):
        if self.dim < 1:
            raise errors.ConfigError(f"per_layer.dim: got {self.dim}, wanted 1 or more")


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """A Gemma text decoder.

    Attributes:
      name: for people and messages; not part of what the pin compares.
      vocab_size: V.
      embed_dim: D, model width.
      hidden_dim: F, feed-forward width.
      num_heads: N, query heads of every layer.
      layer_kinds: SLIDING or FULL per layer, in order; its length is the number of layers L.
      sliding, full: the two attention kinds.
      query_scale: attention logits are multiplied by this.
      final_softcap: c, where the head's logits x become c tanh(x / c); None leaves them as they are.
      norm_eps: epsilon of every RMSNorm.
      norm_plus_one: RMSNorm multiplies by 1 + w (Gemma 3), else by w (Gemma 4).
      value_norm: values go through an RMSNorm without weight.
      layer_scalar: every layer ends by multiplying the residual stream with a number of its own.
      num_kv_shared_layers: number of layers at the end that own no keys and values; each reads those of the last layer
        of its kind that owns some.
      shared_hidden_dim: F of those layers; None means hidden_dim.
      per_layer: per-layer embeddings, or None.
      experts: routed experts of every layer, or None.
      max_positions: positions for which the model was trained.
      pad_id, bos_id: special tokens.
      stop_ids: generation ends on any of these, and on those of the chat.
      suppress_ids: generation never chooses these, which are some of the vocabulary.
    """

    name: str
    vocab_size: int
    embed_dim: int
    hidden_dim: int
    num_heads: int
    layer_kinds: tuple[str, ...]
    sliding: AttentionConfig
    full: AttentionConfig
    query_scale: float
    final_softcap: float | None = None
    norm_eps: float = 1e-6
    norm_plus_one: bool = True
    value_norm: bool = False
    layer_scalar: bool = False
    num_kv_shared_layers: int = 0
    shared_hidden_dim: int | None = None
    per_layer: PerLayerConfig | None = None
    experts: ExpertsConfig | None = None
    max_positions: int = 32768
    pad_id: int = 0
    bos_id: int = 2
    stop_ids: tuple[int, ...] = (1,)
    suppress_ids: tuple[int, ...] = ()

    def __post_init__(self):
        for field in ("vocab_size", "embed_dim", "hidden_dim", "num_heads", "max_positions"):
            if not 0 < getattr(self, field) < 1 << 31:
                raise errors.ConfigError(f"{field}: got {getattr(self, field)}, wanted 1 to {(1 << 31) - 1}")
        if not self.layer_kinds or set(self.layer_kinds) - {SLIDING, FULL}:
            raise errors.ConfigError(
                f"layer_kinds: got {self.layer_kinds!r}, wanted one or more of {SLIDING!r} and {FULL!r}"
            )
        if self.sliding.window is None or self.full.window is not None:
            raise errors.ConfigError("window: the sliding kind needs one and the full kind must have none")
        for field in ("query_scale", "norm_eps", "final_softcap"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, float) and 0 < value < math.inf):
                raise errors.ConfigError(f"{field}: got {value}, wanted a finite number above 0")
        special = {
            "pad_id": (self.pad_id,),
            "bos_id": (self.bos_id,),
            "stop_ids": self.stop_ids,
            "suppress_ids": self.suppress_ids,
        }
        for field, token_ids in special.items():
            if any(not 0 <= token_id < 1 << 31 for token_id in token_ids):
                raise errors.ConfigError(f"{field}: got {getattr(self, field)}, wanted 0 to {(1 << 31) - 1}")
        if any(token_id >= self.vocab_size for token_id in self.suppress_ids):
            raise errors.ConfigError(f"suppress_ids: got {self.suppress_ids}, wanted ids below {self.vocab_size}")
        if len(set(self.suppress_ids)) == self.vocab_size:
            raise errors.ConfigError(f"suppress_ids: got all {self.vocab_size} ids, wanted one left to choose")
        if self.per_layer is not None and self.per_layer.vocab_size < self.vocab_size:
            raise errors.ConfigError(
                f"per_layer.vocab_size: got {self.per_layer.vocab_size}, wanted {self.vocab_size} or more, a row for "
                "every token"
            )
        for kind in (self.sliding, self.full):
            if self.num_heads % kind.num_kv_heads:
                raise errors.ConfigError(f"num_heads: got {self.num_heads}, wanted a multiple of {kind.num_kv_heads}")

        if not 0 <= self.num_kv_shared_layers < self.num_layers:
            raise errors.ConfigError(
                f"num_kv_shared_layers: got {self.num_kv_shared_layers}, wanted 0 to {self.num_layers - 1}"
            )
        if set(self.layer_kinds[self.num_kv_layers :]) - set(self.layer_kinds[: self.num_kv_layers]):
            raise errors.ConfigError("num_kv_shared_layers: a layer that shares has no layer of its kind to share with")

    @property
    def family(self) -> int:
        """Of Gemma: 3 or 4."""
        return 3 if self.norm_plus_one else 4

    @property
    def num_kv_layers(self) -> int:
        """Layers 0 to this one, exclusive, own keys and values."""
        return self.num_layers - self.num_kv_shared_layers

    def kv_layer(self, layer: int) -> int:
        """Returns the layer whose keys and values layer `layer` reads: itself, or the last owner of its kind."""
        if layer < self.num_kv_layers:
            return layer
        kind = self.layer_kinds[layer]
        return max(donor for donor in range(self.num_kv_layers) if self.layer_kinds[donor] == kind)

    def feedforward_dim(self, layer: int) -> int:
        """Returns F of the dense feed-forward layer `layer`."""
        shares = layer >= self.num_kv_layers
        return self.shared_hidden_dim if shares and self.shared_hidden_dim is not None else self.hidden_dim

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layer_kinds)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Attention kinds that have layers, sliding before full."""
        found = []
        for name, attention in ((SLIDING, self.sliding), (FULL, self.full)):
            layers = tuple(layer for layer in range(self.num_kv_layers) if self.layer_kinds[layer] == name)
            if layers:
                found.append(LayerKind(name, attention, layers))
        return tuple(found)

    def attention(self, layer: int) -> AttentionConfig:
        """Returns the attention kind of layer `layer`."""
        return self.sliding if self.layer_kinds[layer] == SLIDING else self.full

    def document(self) -> dict[str, Any]:
        """Returns all that decides the model's numbers as plain JSON data: not name, limits and special tokens."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _NO_NUMBERS}


def repeating_kinds(num_layers: int, period: int = 6) -> tuple[str, ...]:
    """Returns layer kinds: every `period`-th layer (the 6th, the 12th, ...) is full, the others slide.

    Raises:
      ConfigError: a number of layers that no model has.
    """
    if not 0 < num_layers <= MAX_LAYERS:
        raise errors.ConfigError(f"number of layers: got {num_layers}, wanted 1 to {MAX_LAYERS}")
    return tuple(FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers))
