"""The decoder against reference logits of a tiny random Gemma 3: float32 close, bfloat16 to the bit."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import rotary, transformer

GOLDEN = pathlib.Path(__file__).parent / "golden" / "gemma3.npz"
NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_feedforward_norm": "pre_feedforward_layernorm",
    "post_feedforward_norm": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The golden case: its arrays and configuration."""

    arrays: dict[str, np.ndarray]
    config: config_lib.GemmaConfig

    @property
    def token_ids(self) -> np.ndarray:
        return self.arrays["input_ids"].reshape(-1)

    def params(self, dtype: jnp.dtype) -> dict:
        """The parameter tree, mapped here by hand so that the loaders are not part of this test."""
        config = self.config
        attention = config.full

        def get(name: str) -> jax.Array:
            return jnp.asarray(self.arrays[f"w/model.{name}.weight"].astype(dtype))

        tree = {"embedder": {"embedding": get("embed_tokens")}, "final_norm": {"scale": get("norm")}}
        heads = {"q_proj": config.num_heads, "k_proj": attention.num_kv_heads, "v_proj": attention.num_kv_heads}
        for i in range(config.num_layers):
            here = f"layers.{i}"
            layer = {ours: {"scale": get(f"{here}.{theirs}")} for ours, theirs in NORMS.items()}
            layer["mlp"] = {n: {"kernel": get(f"{here}.mlp.{n}").T} for n in ("gate_proj", "up_proj", "down_proj")}
            layer["attention"] = {
                name: {"kernel": get(f"{here}.self_attn.{name}").T.reshape(config.embed_dim, n, attention.head_dim)}
                for name, n in heads.items()
            }
            out = get(f"{here}.self_attn.o_proj").T.reshape(config.num_heads, attention.head_dim, config.embed_dim)
            layer["attention"]["o_proj"] = {"kernel": out}
            for name in ("q_norm", "k_norm"):
                layer["attention"][name] = {"scale": get(f"{here}.self_attn.{name}")}
            tree[f"layer_{i}"] = layer
        return tree


@pytest.fixture(scope="module")
def case() -> Case:
    with np.load(GOLDEN) as file:
        arrays = {name: file[name] for name in file.files}
    hf = json.loads(str(arrays["hf_config_json"]))
    kinds = {"sliding_attention": config_lib.SLIDING, "full_attention": config_lib.FULL}
    ropes = hf["rope_parameters"]
    sliding, full = (
        config_lib.AttentionConfig(
            hf["num_key_value_heads"],
            hf["head_dim"],
            config_lib.RotaryConfig(ropes[kind]["rope_theta"], ropes[kind].get("factor", 1.0)),
            window,
        )
        for kind, window in (("sliding_attention", hf["sliding_window"]), ("full_attention", None))
    )
    config = config_lib.GemmaConfig(
        name="golden",
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        layer_kinds=tuple(kinds[kind] for kind in hf["layer_types"]),
        sliding=sliding,
        full=full,
        query_scale=hf["query_pre_attn_scalar"] ** -0.5,
        norm_eps=hf["rms_norm_eps"],
    )
    return Case(arrays, config)


def forward(case: Case, dtype: str, *, width: int, kv_block: int, config: config_lib.GemmaConfig | None = None):
    """Logits [T, V] and hidden states [L + 2, T, D] of the golden tokens, `width` lanes at a time."""
    config, as_dtype = config or case.config, jnp.dtype(dtype)
    model = transformer.Transformer(config, as_dtype, kv_block)
    params = case.params(as_dtype)
    num_slots = 2 * kv_block + width + 64 // kv_block * kv_block
    cache, tables = cache_lib.make_cache(config, num_slots, as_dtype), rotary.make_tables(config, num_slots, as_dtype)

    @jax.jit
    def step(tokens_T, cache, start, count):
        (hidden_TxD, cache), extra = model.apply(
            {"params": params}, tokens_T, tables, cache, start, count, mutable=["intermediates"]
        )
        states = (*extra["intermediates"]["hidden_TxD"][:-1], hidden_TxD)
        logits_TxV = model.apply({"params": params}, hidden_TxD, method=model.head)
        return logits_TxV, jnp.stack(states).astype(jnp.float32), cache

    logits, hidden = [], []
    for start in range(0, len(case.token_ids), width):
        chunk = case.token_ids[start : start + width]
        tokens_T = np.zeros(width, np.int32)
        tokens_T[: len(chunk)] = chunk
        logits_TxV, states, cache = step(tokens_T, cache, np.int32(start), np.int32(len(chunk)))
        logits.append(np.asarray(logits_TxV)[: len(chunk)])
        hidden.append(np.asarray(states)[:, : len(chunk)])
    return np.concatenate(logits), np.concatenate(hidden, axis=1)


@pytest.mark.parametrize(("width", "kv_block"), [(1, 8), (8, 16), (64, 256)])
def test_float32_matches_reference(case, width, kv_block):
    logits_TxV, hidden = forward(case, "float32", width=width, kv_block=kv_block)
    np.testing.assert_allclose(logits_TxV, case.arrays["logits_f32"], rtol=0, atol=1e-4)
    wanted = case.arrays["hidden_states_f32"].reshape(hidden.shape)
    for layer in range(len(hidden)):
        scale = np.abs(wanted[layer]).max()
        np.testing.assert_allclose(hidden[layer] / scale, wanted[layer] / scale, rtol=0, atol=1e-5, err_msg=str(layer))


@pytest.mark.parametrize(("width", "kv_block"), [(1, 8), (8, 8), (8, 16), (16, 32), (64, 256)])
def test_bfloat16_is_bit_identical_to_reference(case, width, kv_block):
    logits_TxV, _ = forward(case, "bfloat16", width=width, kv_block=kv_block)
    np.testing.assert_array_equal(logits_TxV, case.arrays["logits_bf16"])


def _sliding(config: config_lib.GemmaConfig, **changes) -> config_lib.GemmaConfig:
    return dataclasses.replace(config, sliding=dataclasses.replace(config.sliding, **changes))


MISTAKES = {
    "window too small": lambda c: _sliding(c, window=c.sliding.window - 1),
    "window too large": lambda c: _sliding(c, window=c.sliding.window + 1),
    "scale from head width": lambda c: dataclasses.replace(c, query_scale=c.full.head_dim**-0.5),
    "no linear rotary scale": lambda c: dataclasses.replace(
        c, full=dataclasses.replace(c.full, rotary=config_lib.RotaryConfig(c.full.rotary.base))
    ),
    "local base = global base": lambda c: _sliding(c, rotary=config_lib.RotaryConfig(c.full.rotary.base)),
    "all layers slide": lambda c: dataclasses.replace(c, layer_kinds=(config_lib.SLIDING,) * c.num_layers),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_parity_sees_a_wrong_configuration(case, mistake):
    logits_TxV, _ = forward(case, "bfloat16", width=8, kv_block=16, config=MISTAKES[mistake](case.config))
    assert np.mean(logits_TxV == case.arrays["logits_bf16"]) < 0.5
