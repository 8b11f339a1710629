"""The released sizes of Gemma 3, by name. Sources: the public configuration files and conversion tables."""

from __future__ import annotations

from kvgraft_jax import errors
from kvgraft_jax.gemma import config as config_lib


def _gemma3(
    name: str,
    *,
    layers: int,
    embed_dim: int,
    hidden_dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 256,
    window: int = 1024,
    full_rotary_scale: float = 8.0,
    query_pre_attn_scalar: float = 256.0,
    vocab_size: int = 262_208,
    max_positions: int = 131_072,
) -> config_lib.GemmaConfig:
    return config_lib.GemmaConfig(
        name=name,
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        hidden_dim=hidden_dim,
        num_heads=heads,
        layer_kinds=config_lib.repeating_kinds(layers),
        sliding=config_lib.AttentionConfig(kv_heads, head_dim, config_lib.RotaryConfig(1e4), window),
        full=config_lib.AttentionConfig(kv_heads, head_dim, config_lib.RotaryConfig(1e6, full_rotary_scale)),
        query_scale=query_pre_attn_scalar**-0.5,
        max_positions=max_positions,
    )


_TEXT_ONLY = dict(window=512, full_rotary_scale=1.0, vocab_size=262_144, max_positions=32_768)

CONFIGURATIONS = {
    config.name: config
    for config in (
        _gemma3("gemma-3-270m", layers=18, embed_dim=640, hidden_dim=2048, heads=4, kv_heads=1, **_TEXT_ONLY),
        _gemma3("gemma-3-1b", layers=26, embed_dim=1152, hidden_dim=6912, heads=4, kv_heads=1, **_TEXT_ONLY),
        _gemma3("gemma-3-4b", layers=34, embed_dim=2560, hidden_dim=10_240, heads=8, kv_heads=4),
        _gemma3("gemma-3-12b", layers=48, embed_dim=3840, hidden_dim=15_360, heads=16, kv_heads=8),
        _gemma3(
            "gemma-3-27b",
            layers=62,
            embed_dim=5376,
            hidden_dim=21_504,
            heads=32,
            kv_heads=16,
            head_dim=128,
            query_pre_attn_scalar=168.0,
        ),
    )
}


def get(name: str) -> config_lib.GemmaConfig:
    """The configuration called `name`; `ConfigError` lists the known names otherwise."""
    try:
        return CONFIGURATIONS[name]
    except KeyError:
        raise errors.ConfigError(f"model name: got {name!r}, wanted one of {', '.join(CONFIGURATIONS)}") from None
