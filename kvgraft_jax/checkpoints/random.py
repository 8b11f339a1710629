"""Random weights for any configuration, made on the device: the same bits in every process, order and program.

A value is an integer hash of (seed, parameter path, index), so nothing depends on a generator's state or flags.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math

import jax
from jax import lax, sharding
import jax.numpy as jnp
import numpy as np

from kvgraft_jax import digest as digest_lib
from kvgraft_jax import errors
from kvgraft_jax.checkpoints import assemble
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.gemma import sharding as sharding_lib

_FACTOR_RANGE = 0.25  # A power of two: see `_uniform`.


def cut(
    config: config_lib.GemmaConfig,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    embed: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    window: int | None = None,
    experts: int | None = None,
    per_layer: int | None = None,
) -> config_lib.GemmaConfig:
    """Returns `config` with other sizes; None leaves a size as it is.

    The first `layers` layers keep their kinds. Of a model whose last layers share keys and values, the cut one shares
    in the same proportion of its layers, rounded down, or in the most below it that leaves every kind a layer to share
    with. `kv_heads` and `head_dim` are those of sliding layers, `hidden` is that of ordinary feed-forward layers:
    what is a multiple or a fraction of them (in full layers, in layers that share, in experts) stays so, at least 1.
    `vocab` also cuts the per-layer table and the ids that are never generated.

    Args:
      config: a released size.
      layers, vocab, embed, hidden, heads, window: as the fields of `GemmaConfig`.
      kv_heads, head_dim: of sliding layers.
      experts: number of experts; a token goes through no more than there are.
      per_layer: width of the per-layer embeddings.

    Raises:
      ConfigError: a size that does not fit the others, or of a part that this model does not have.
    """
    if layers is not None and not 1 <= layers <= config.num_layers:
        raise errors.ConfigError(f"layers: got {layers}, wanted 1 to {config.num_layers}, the layers of {config.name}")
    sizes = {"vocab": vocab, "embed": embed, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"head_dim": head_dim, "window": window, "experts": experts, "per_layer": per_layer}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise errors.ConfigError(f"{name}: got {size}, wanted 1 or more")
    for name, part in (("experts", config.experts), ("per_layer", config.per_layer)):
        if sizes[name] is not None and part is None:
            raise errors.ConfigError(f"{name}: got {sizes[name]}, a size of a part that {config.name} does not have")

    def scaled(size: int, new: int | None, old: int) -> int:
        return size if new is None else max(1, size * new // old)

    def kind(attention: config_lib.AttentionConfig) -> config_lib.AttentionConfig:
        return dataclasses.replace(
            attention,
            num_kv_heads=scaled(attention.num_kv_heads, kv_heads, config.sliding.num_kv_heads),
            head_dim=scaled(attention.head_dim, head_dim, config.sliding.head_dim),
            window=window if attention.window is not None and window is not None else attention.window,
        )

    full = kind(config.full)
    follows_head_dim = config.query_scale == config.full.head_dim**-0.5
    vocab_size = config.vocab_size if vocab is None else vocab
    kinds = config.layer_kinds[:layers]
    return dataclasses.replace(
        config,
        vocab_size=vocab_size,
        embed_dim=config.embed_dim if embed is None else embed,
        hidden_dim=config.hidden_dim if hidden is None else hidden,
        num_heads=config.num_heads if heads is None else heads,
        layer_kinds=kinds,
        sliding=kind(config.sliding),
        full=full,
        query_scale=full.head_dim**-0.5 if follows_head_dim else config.query_scale,
        num_kv_shared_layers=_shared_layers(config, kinds),
        shared_hidden_dim=config.shared_hidden_dim and scaled(config.shared_hidden_dim, hidden, config.hidden_dim),
        per_layer=config.per_layer
        and config_lib.PerLayerConfig(
            config.per_layer.vocab_size if vocab is None else vocab, per_layer or config.per_layer.dim
        ),
        experts=config.experts
        and config_lib.ExpertsConfig(
            experts or config.experts.num_experts,
            min(config.experts.top_k, experts or config.experts.num_experts),
            scaled(config.experts.hidden_dim, hidden, config.hidden_dim),
        ),
        suppress_ids=tuple(token for token in config.suppress_ids if token < vocab_size),
    )


def _shared_layers(config: config_lib.GemmaConfig, kinds: tuple[str, ...]) -> int:
    """Counts the last layers that share keys and values once a model is cut to the layers `kinds`; see `cut`."""
    shared = config.num_kv_shared_layers * len(kinds) // config.num_layers
    while set(kinds[len(kinds) - shared :]) - set(kinds[: len(kinds) - shared]):
        shared -= 1
    return shared


def initialise(
    config: config_lib.GemmaConfig, seed: int, dtype: np.dtype, mesh: sharding.Mesh | None = None
) -> assemble.Assembled:
    """Draws random parameters for `config`.

    Math: kernels and embeddings are uniform with variance 1 / fan-in (for an embedding its width, so that scaled
    embeddings and logits have variance near 1); norm weights and other factors are uniform within 0.25 of what leaves
    their argument as it is: 0 for norms that multiply by 1 + w, else 1.

    Exact: bit-exact across processes, backends and load order; bfloat16 values are the float32 ones, rounded.

    Args:
      config: any configuration.
      seed: chooses the weights; 0 or above.
      dtype: dtype of all leaves.
      mesh: over which the parameters are spread; None is the default device.
    """

    def load(parameter: parameters_lib.Parameter) -> tuple[parameters_lib.Leaf, str]:
        fan_in = parameter.stored_shape[-1] if parameter.matrices else parameter.shape[-1]
        bound = _FACTOR_RANGE if parameter.is_scale else math.sqrt(3.0 / fan_in)
        centre = 0 if config.norm_plus_one or not parameter.is_scale else round(2**23 / _FACTOR_RANGE)
        key = int.from_bytes(hashlib.sha256(f"{seed}/{parameter.path}".encode()).digest()[:8], "little")
        words = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
        place = sharding_lib.of_parameter(mesh, parameter, parameter.shape)
        numbers = (*words, np.int32(centre), np.float32(bound * 2.0**-23))
        given = jax.device_put(numbers, sharding_lib.whole(mesh))
        values = _uniform(*given, parameter.shape, dtype, place)
        # An array keeps the host copy that it once gave out: hash that of a copy, which is dropped. One on the host
        # gives out itself.
        is_on_host = [device.platform for device in values.devices()] == ["cpu"]
        content = digest_lib.array_digest(jax.device_get(values if is_on_host else jnp.copy(values)))
        shapes = parameter.chunk_shapes
        if len(shapes) == 1:
            return parameter.leaf([values]), content
        places = [sharding_lib.of_parameter(mesh, parameter, shape) for shape in shapes]
        chunks = zip(parameter.split(values), places, strict=True)
        return parameter.leaf([jax.device_put(chunk, place) for chunk, place in chunks]), content

    return assemble.collect(config.name, config, dtype, mesh, load)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "place"))
def _uniform(
    low: jax.Array,
    high: jax.Array,
    centre: jax.Array,
    step: jax.Array,
    shape: tuple[int, ...],
    dtype: np.dtype,
    place: sharding.Sharding | None = None,
) -> jax.Array:
    """Draws multiples of `step`, uniform in `centre` ±2^23 steps.

    Integer operations, then one rounding to float32 each for the integer (none around 0) and its product with `step`.
    """
    columns = shape[-1]
    rows = shape[:-1]
    index = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)
    stride = columns
    for axis in reversed(range(len(rows))):
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    bits = _mix(_mix(index ^ low) + high)
    integers = lax.shift_right_logical(bits, jnp.uint32(8)).astype(jnp.int32) - jnp.int32(1 << 23)
    values = ((integers + centre).astype(jnp.float32) * step).astype(dtype)
    return values if place is None else lax.with_sharding_constraint(values, place)


def _mix(bits: jax.Array) -> jax.Array:
    """Maps 32-bit words one to one, so that every input bit reaches every output bit (the MurmurHash3 finaliser)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ lax.shift_right_logical(bits, jnp.uint32(shift))) * jnp.uint32(factor)
    return bits ^ lax.shift_right_logical(bits, jnp.uint32(16))
