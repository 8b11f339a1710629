"""The released sizes of Gemma 3 and 4, by name. Sources: the public configuration files and conversion tables."""

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


def _gemma4(
    name: str,
    *,
    layers: int,
    embed_dim: int,
    hidden_dim: int,
    heads: int,
    kv_heads: int,
    full_kv_heads: int,
    window: int = 1024,
    period: int = 6,
    values_are_keys: bool = True,
    max_positions: int = 262_144,
    num_kv_shared_layers: int = 0,
    shared_hidden_dim: int | None = None,
    per_layer: config_lib.PerLayerConfig | None = None,
    experts: config_lib.ExpertsConfig | None = None,
    suppress_ids: tuple[int, ...] = (),
) -> config_lib.GemmaConfig:
    return config_lib.GemmaConfig(
        name=name,
        vocab_size=262_144,
        embed_dim=embed_dim,
        hidden_dim=hidden_dim,
        num_heads=heads,
        layer_kinds=config_lib.repeating_kinds(layers, period),
        sliding=config_lib.AttentionConfig(kv_heads, 256, config_lib.RotaryConfig(1e4), window),
        full=config_lib.AttentionConfig(
            full_kv_heads, 512, config_lib.RotaryConfig(1e6, fraction=0.25), values_are_keys=values_are_keys
        ),
        query_scale=1.0,
        final_softcap=30.0,
        norm_plus_one=False,
        value_norm=True,
        layer_scalar=True,
        num_kv_shared_layers=num_kv_shared_layers,
        shared_hidden_dim=shared_hidden_dim,
        per_layer=per_layer,
        experts=experts,
        max_positions=max_positions,
        suppress_ids=suppress_ids,
    )


_ON_DEVICE = dict(
    window=512, values_are_keys=False, max_positions=131_072, per_layer=config_lib.PerLayerConfig(262_144, 256)
)

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
        _gemma4(
            "gemma-4-e2b",
            layers=35,
            embed_dim=1536,
            hidden_dim=6144,
            heads=8,
            kv_heads=1,
            full_kv_heads=1,
            period=5,
            num_kv_shared_layers=20,
            shared_hidden_dim=12_288,
            **_ON_DEVICE,
        ),
        _gemma4(
            "gemma-4-e4b",
            layers=42,
            embed_dim=2560,
            hidden_dim=10_240,
            heads=8,
            kv_heads=2,
            full_kv_heads=2,
            num_kv_shared_layers=18,
            **_ON_DEVICE,
        ),
        _gemma4(
            "gemma-4-12b",
            layers=48,
            embed_dim=3840,
            hidden_dim=15_360,
            heads=16,
            kv_heads=8,
            full_kv_heads=1,
            suppress_ids=(258_883, 258_882),
        ),
        _gemma4("gemma-4-31b", layers=60, embed_dim=5376, hidden_dim=21_504, heads=32, kv_heads=16, full_kv_heads=4),
        _gemma4(
            "gemma-4-26b-a4b",
            layers=30,
            embed_dim=2816,
            hidden_dim=2112,
            heads=16,
            kv_heads=8,
            full_kv_heads=2,
            experts=config_lib.ExpertsConfig(num_experts=128, top_k=8, hidden_dim=704),
        ),
    )
}


def get(name: str) -> config_lib.GemmaConfig:
    """Returns the configuration called `name`; `ConfigError` lists the known names otherwise."""
    try:
        return CONFIGURATIONS[name]
    except KeyError:
        raise errors.ConfigError(f"model name: got {name!r}, wanted one of {', '.join(CONFIGURATIONS)}") from None
