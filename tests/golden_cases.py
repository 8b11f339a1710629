"""The golden cases: reference logits of tiny random models, their configurations and parameters, and a way to run them.

The loaders have no part in this, but the table of parameters that they read too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.gemma import rotary
from kvgraft_jax.runtime import step as step_lib

DIRECTORY = pathlib.Path(__file__).parent / "golden"
TINY = ("gemma3", "e2b", "31b", "12b", "26b")
WIDE = ("wide_31b", "wide_e2b")  # Real head widths, more tokens than the window; made by golden/make_cases.py.
# Their bfloat16 logits depend on the order of sums. On a processor with AVX2, the order of `products` gives those of
# the reference for wide_e2b, with every width and K/V block tried, and not for long_26b, whose bits also depend on the
# K/V block. This is no rule for other processors or cases, so both are compared layer by layer.
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
        """Returns the parameters by path, each in one piece."""
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
        return self.tree(self.leaves(dtype))

    def tree(self, leaves: Mapping[str, jax.Array]) -> parameters_lib.Params:
        """Returns the parameter tree of whole arrays by path, each cut into its chunks."""
        parameters = parameters_lib.parameters(self.config)
        return parameters_lib.nest({p.path: p.leaf(p.split(leaves[p.path])) for p in parameters})


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
    """Step and head of a configuration, dtype and K/V block, compiled once per width.

    Attributes:
      step: from parameters, tables, cache and lanes to logits [T, V], hidden states [L + 1, T, D] and the cache.
    """

    config: config_lib.GemmaConfig
    dtype: str
    kv_block: int
    step: Any

    def run(
        self,
        params: parameters_lib.Params,
        token_ids: np.ndarray,
        steps: Iterable[tuple[int, int]],
        *,
        rotary_config: config_lib.GemmaConfig | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, V] and hidden states [L + 1, T, D] as float32.

        Args:
          params: the parameters.
          token_ids: T of them.
          steps: of each step the width, and how many tokens it reads at most; repeated until all are read.
          rotary_config: whose rotary tables to use instead.
        """
        num_blocks, dtype = -(-len(token_ids) // self.kv_block), jnp.dtype(self.dtype)
        cache = cache_lib.make_cache(self.config, num_blocks, self.kv_block, dtype)
        tables = rotary.make_tables(rotary_config or self.config, num_blocks * self.kv_block, dtype)
        logits, states, start = [], [], 0
        for width, count in itertools.cycle(steps):
            piece = step_lib.Piece(0, start, tuple(token_ids[start : start + count]))
            lanes = step_lib.lay_out([piece], [range(num_blocks)], width, self.kv_block)
            logits_TxV, states_LxTxD, cache = self.step(params, tables, cache, lanes)
            logits.append(logits_TxV[: len(piece.tokens)])
            states.append(states_LxTxD[:, : len(piece.tokens)])
            start += len(piece.tokens)
            if start == len(token_ids):
                return np.concatenate(logits), np.concatenate(states, axis=1)


def build(config: config_lib.GemmaConfig, dtype: str, kv_block: int) -> Program:
    """Builds the programs of an engine, which compile on their first run at each width."""
    programs, states = step_lib.Programs(step_lib.StepConfig(config, dtype, kv_block)), []

    def keep_input(run: Callable) -> Callable:
        return lambda params, x_TxD, *rest: states.append(x_TxD) or run(params, x_TxD, *rest)

    programs.layers = [keep_input(run) for run in programs.layers]

    def step(params, tables, cache, lanes):
        states.clear()
        result = programs.step(params, tables, cache, lanes)
        width, logits = len(result.hidden_TxD), []
        for lanes_B in step_lib.head_lanes(range(width)):
            logits += programs.head(params, result.hidden_TxD, lanes_B)
        states_LxTxD = np.stack([np.asarray(x_TxD.astype(jnp.float32)) for x_TxD in (*states, result.hidden_TxD)])
        return np.stack(logits[:width]), states_LxTxD, result.cache

    return Program(config, dtype, kv_block, step)


shared_program = functools.cache(build)
