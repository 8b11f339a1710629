"""The golden cases: reference logits of tiny random models, their configurations and parameters, and a way to run them.

The loaders have no part in this, but the table of parameters that they read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.gemma import rotary, transformer

DIRECTORY = pathlib.Path(__file__).parent / "golden"
TINY = ("gemma3", "e2b", "31b", "12b", "26b")
WIDE = ("wide_31b", "wide_e2b")  # Real head widths, more tokens than the window; made by golden/make_cases.py.
# Their bfloat16 logits depend on the order of sums. That of wide_e2b was found later: with AVX-512 its logits are the
# reference's to the bit, with AVX2 one key of its second layer rounds the other way, and everything behind it follows.
NOT_ORDER_FREE = ("wide_e2b", "long_26b")
_KINDS = {"sliding_attention": config_lib.SLIDING, "full_attention": config_lib.FULL}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A golden case: its arrays and configuration."""

    name: str
    arrays: Mapping[str, np.ndarray]
    config: config_lib.GemmaConfig

    @property
    def token_ids(self) -> np.ndarray:
        return self.arrays["input_ids"].reshape(-1)

    def hidden_states(self, dtype: str) -> np.ndarray:
        """[L + 1, T, D]: the embeddings, then the stream after each layer, after the last one normed."""
        states = self.arrays[f"hidden_states_{dtype}"]
        return states.reshape(self.config.num_layers + 1, len(self.token_ids), -1)

    @functools.cache  # noqa: B019 - cases live as long as the tests
    def leaves(self, dtype: str) -> dict[str, jax.Array]:
        """Returns the parameters by path."""
        found = {}
        for parameter in parameters_lib.parameters(self.config):
            stored = self.arrays[f"w/model.{parameter.name}"]
            assert stored.shape == parameter.stored_shape, parameter
            if parameter.matrices:
                stored = np.swapaxes(stored.reshape(parameter.matrices, -1, stored.shape[-1]), 1, 2)
            found[parameter.path] = jnp.asarray(stored.reshape(parameter.shape).astype(jnp.dtype(dtype)))
        return found

    def params(self, dtype: str) -> parameters_lib.Params:
        """Returns the parameter tree."""
        return parameters_lib.nest(self.leaves(dtype))


@functools.cache
def load(name: str) -> Case:
    """Returns the case `name`."""
    with np.load(DIRECTORY / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    return Case(name, arrays, config_of(json.loads(str(arrays["hf_config_json"]))))


def config_of(hf: Mapping[str, Any]) -> config_lib.GemmaConfig:
    """Returns the configuration that a config.json of transformers 5.24 means."""
    is_gemma4 = hf["model_type"] != "gemma3_text"
    kinds = tuple(_KINDS[kind] for kind in hf["layer_types"])
    overrides = {int(layer): values for layer, values in hf.get("per_layer_config", {}).items()}

    def attention(kind: str, **own) -> config_lib.AttentionConfig:
        layer = hf["layer_types"].index(kind)
        values = {key: overrides.get(layer, {}).get(key, hf[key]) for key in ("num_key_value_heads", "head_dim")}
        rope = hf["rope_parameters"][kind]
        encoding = config_lib.RotaryConfig(
            rope["rope_theta"], rope.get("factor", 1.0), rope.get("partial_rotary_factor", 1.0)
        )
        return config_lib.AttentionConfig(values["num_key_value_heads"], values["head_dim"], encoding, **own)

    per_layer = hf.get("hidden_size_per_layer_input")
    return config_lib.GemmaConfig(
        name="golden",
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        layer_kinds=kinds,
        sliding=attention("sliding_attention", window=hf["sliding_window"]),
        full=attention("full_attention", values_are_keys=hf.get("attention_k_eq_v", False)),
        query_scale=1.0 if is_gemma4 else hf["query_pre_attn_scalar"] ** -0.5,
        final_softcap=hf["final_logit_softcapping"],
        norm_eps=hf["rms_norm_eps"],
        norm_plus_one=not is_gemma4,
        value_norm=is_gemma4,
        layer_scalar=is_gemma4,
        num_kv_shared_layers=hf.get("num_kv_shared_layers", 0),
        shared_hidden_dim=2 * hf["intermediate_size"] if hf.get("use_double_wide_mlp") else None,
        per_layer=config_lib.PerLayerConfig(hf["vocab_size_per_layer_input"], per_layer) if per_layer else None,
        experts=config_lib.ExpertsConfig(hf["num_experts"], hf["top_k_experts"], hf["moe_intermediate_size"])
        if hf.get("enable_moe_block")
        else None,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One compiled step of a configuration, dtype, width and K/V block.

    Attributes:
      step: from parameters, tables, cache, tokens [W], start and count to logits [W, V], hidden states [L + 1, W, D]
        and the cache.
    """

    config: config_lib.GemmaConfig
    dtype: str
    width: int
    kv_block: int
    step: Any

    def run(
        self,
        params: parameters_lib.Params,
        token_ids: np.ndarray,
        *,
        cuts: Sequence[int] = (),
        rotary_config: config_lib.GemmaConfig | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, V] and hidden states [L + 1, T, D] as float32.

        Args:
          params: the parameters.
          token_ids: T of them.
          cuts: number of tokens of the first steps; what they leave goes through at full width.
          rotary_config: whose rotary tables to use instead.
        """
        num_slots = -(-(len(token_ids) + self.width) // self.kv_block) * self.kv_block
        dtype = jnp.dtype(self.dtype)
        cache = cache_lib.make_cache(self.config, num_slots, dtype)
        tables = rotary.make_tables(rotary_config or self.config, num_slots, dtype)
        logits, states, start = [], [], 0
        cuts = [*cuts, *[self.width] * len(token_ids)]
        while start < len(token_ids):
            chunk = token_ids[start : start + cuts.pop(0)]
            tokens_T = np.zeros(self.width, np.int32)
            tokens_T[: len(chunk)] = chunk
            logits_TxV, states_LxTxD, cache = self.step(
                params, tables, cache, tokens_T, np.int32(start), np.int32(len(chunk))
            )
            logits.append(np.asarray(logits_TxV)[: len(chunk)])
            states.append(np.asarray(states_LxTxD)[:, : len(chunk)])
            start += len(chunk)
        return np.concatenate(logits), np.concatenate(states, axis=1)


def build(config: config_lib.GemmaConfig, dtype: str, width: int, kv_block: int) -> Program:
    """Builds a program that compiles on its first run."""
    model = transformer.Transformer(config, jnp.dtype(dtype), kv_block)

    @jax.jit
    def step(params, tables, cache, tokens_T, start, count):
        (hidden_TxD, cache), extra = model.apply(
            {"params": params}, tokens_T, tables, cache, start, count, mutable=["intermediates"]
        )
        states = (*extra["intermediates"]["hidden_TxD"][:-1], hidden_TxD)
        logits_TxV = model.apply({"params": params}, hidden_TxD, method=model.head)
        return logits_TxV, jnp.stack(states).astype(jnp.float32), cache

    return Program(config, dtype, width, kv_block, step)


shared_program = functools.cache(build)
