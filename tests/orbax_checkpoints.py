"""Writes small checkpoints as DeepMind publishes them, in each layout and by old and new Orbax, to test the loader.

Names and shapes are spelled out here on their own, from the parameter tree, without the table that the loader reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as old_ocp
from orbax.checkpoint import v1 as ocp

from kvgraft_jax.checkpoints import assemble
from kvgraft_jax.checkpoints import random as random_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.gemma import parameters as parameters_lib

BF16 = np.dtype(jnp.bfloat16)
VOCAB_SIZE = 420  # As many as `tiny_tokenizers.sentencepiece_model` has pieces.
# Of 8 or 7 layers the stacks have fewer entries of some kinds than of others.
_CUTS = {
    "gemma3": ("gemma-3-27b", 8, 2, 16, 16),
    "dense": ("gemma-4-31b", 6, 1, 8, 16),
    "shared": ("gemma-4-e2b", 10, 1, 8, 16),
    "experts": ("gemma-4-26b-a4b", 7, 2, 8, 16),
}
KINDS = tuple(_CUTS)
Write = Callable[[pathlib.Path, dict], None]


@functools.cache
def config(kind: str) -> config_lib.GemmaConfig:
    """Returns a small model with all that is particular to its kind."""
    name, layers, full_kv_heads, head_dim, full_head_dim = _CUTS[kind]
    real = configurations.get(name)
    return dataclasses.replace(
        real,
        name=f"small-{kind}",
        vocab_size=VOCAB_SIZE,
        embed_dim=24,
        hidden_dim=20,
        num_heads=4,
        layer_kinds=real.layer_kinds[:layers],
        sliding=dataclasses.replace(real.sliding, num_kv_heads=2, head_dim=head_dim, window=5),
        full=dataclasses.replace(real.full, num_kv_heads=full_kv_heads, head_dim=full_head_dim),
        num_kv_shared_layers=5 if real.num_kv_shared_layers else 0,
        shared_hidden_dim=28 if real.shared_hidden_dim else None,
        per_layer=real.per_layer and config_lib.PerLayerConfig(VOCAB_SIZE + 1, dim=6),
        experts=real.experts and config_lib.ExpertsConfig(num_experts=5, top_k=2, hidden_dim=14),
    )


@functools.cache
def weights(kind: str) -> assemble.Assembled:
    """Random weights of it."""
    return random_lib.initialise(config(kind), 7, BF16)


def arrays(kind: str) -> dict[str, np.ndarray]:
    """Returns the weights under DeepMind's names, as in the nested layout."""
    small = config(kind)
    tree = parameters_lib.nest(parameters_lib.whole(small, weights(kind).params))
    found = {
        "embedder/input_embedding": tree["embedder"]["embedding"],
        "final_norm/scale": tree["final_norm"]["scale"],
    }
    if small.per_layer:
        extra = tree["per_layer_embedder"]
        found["embedder/per_layer_embeddings"] = extra["embedding"]
        found["embedder/per_layer_model_projection/w"] = extra["proj"]["kernel"]
        found["embedder/per_layer_projection_norm/scale"] = extra["norm"]["scale"]
    for layer in range(small.num_layers):
        below = _attention(tree[f"layer_{layer}"], "_" if kind == "gemma3" else "")
        below |= (_experts if small.experts else _dense)(tree[f"layer_{layer}"])
        found |= {f"layer_{layer}/{name}": array for name, array in below.items()}
    return found


def _attention(layer: dict, mark: str) -> dict[str, np.ndarray]:
    kernels = {name: part["kernel"] for name, part in layer["attention"].items() if name.endswith("proj")}
    keys_values_KxDxH = [kernels[name].transpose(1, 0, 2) for name in ("k_proj", "v_proj") if name in kernels]
    found = {
        "attn/q_einsum/w": kernels["q_proj"].transpose(1, 0, 2),
        "attn/attn_vec_einsum/w": kernels["o_proj"],
        f"attn/{mark}query_norm/scale": layer["attention"]["q_norm"]["scale"],
        "pre_attention_norm/scale": layer["pre_attention_norm"]["scale"],
        "post_attention_norm/scale": layer["post_attention_norm"]["scale"],
        "post_ffw_norm/scale": layer["post_feedforward_norm"]["scale"],
    }
    if keys_values_KxDxH:
        found[f"attn/{mark}key_norm/scale"] = layer["attention"]["k_norm"]["scale"]
    if len(keys_values_KxDxH) == 1:
        found["attn/k_einsum/w"] = keys_values_KxDxH[0]
    elif keys_values_KxDxH:
        found["attn/kv_einsum/w"] = np.stack(keys_values_KxDxH)
    if "layer_scalar" in layer:
        found["skip_scale"] = layer["layer_scalar"]
    if "per_layer_input" in layer:
        found["per_layer_input_gate/w"] = layer["per_layer_input"]["gate"]["kernel"]
        found["per_layer_projection/w"] = layer["per_layer_input"]["proj"]["kernel"]
        found["post_per_layer_input_norm/scale"] = layer["per_layer_input"]["norm"]["scale"]
    return found


def _dense(layer: dict, name: str = "mlp") -> dict[str, np.ndarray]:
    gate, up, down = (layer["mlp"][f"{part}_proj"]["kernel"] for part in ("gate", "up", "down"))
    found = {f"{name}/gating_einsum": np.stack([gate.T, up.T]), f"{name}/linear": down}
    return found | ({"pre_ffw_norm/scale": layer["pre_feedforward_norm"]["scale"]} if name == "mlp" else {})


def _experts(layer: dict) -> dict[str, np.ndarray]:
    gate_ExDxX, up_ExDxX = np.split(layer["experts"]["gate_up"], 2, axis=2)
    return _dense(layer, "mlp2") | {
        "mlp/gating_einsum": np.stack([gate_ExDxX, up_ExDxX], axis=1).transpose(0, 1, 3, 2),
        "mlp/linear": layer["experts"]["down"],
        "mlp/router_logits/w": layer["router"]["proj"]["kernel"],
        "mlp/router_scale": layer["router"]["scale"],
        "mlp/per_expert_scale": layer["router"]["per_expert_scale"],
        "pre_ffw_norm/scale": layer["pre_experts_norm"]["scale"],
        "pre_ffw2_norm/scale": layer["pre_feedforward_norm"]["scale"],
        "post_ffw1_norm/scale": layer["post_experts_norm"]["scale"],
        "post_ffw2_norm/scale": layer["post_dense_norm"]["scale"],
    }


def flat(named: Mapping[str, np.ndarray], prefix: str = "transformer/") -> dict:
    """Returns the flat layout: one key per module, its parameters below it."""
    tree: dict[str, dict] = {}
    for name, array in named.items():
        name = f"{name}/w" if name.endswith(("/gating_einsum", "/linear")) else name
        module, _, last = f"{prefix}{name}".rpartition("/")
        tree.setdefault(module, {})[last] = array
    return tree


def stacked(named: Mapping[str, np.ndarray], period: int = 6) -> dict:
    """Returns the flat layout with the layers of each place in the pattern stacked."""
    layers: dict[str, list[np.ndarray]] = {}
    rest = {}
    for name, array in named.items():
        if name.startswith("layer_"):
            layer, _, below = name.removeprefix("layer_").partition("/")
            layers.setdefault(f"stacked_layers/attention_type_{int(layer) % period}/{below}", []).append(array)
        else:
            rest[name] = array
    return flat(rest | {name: np.stack(parts) for name, parts in layers.items()})


def nested(named: Mapping[str, np.ndarray]) -> dict:
    """Returns the nested layout."""
    tree: dict = {}
    for name, array in named.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


LAYOUTS = {"flat": flat, "stacked": stacked, "nested": nested}


def write_old(directory: pathlib.Path, tree: dict, use_ocdbt: bool = True, chunk_bytes: int | None = None) -> None:
    """As `PyTreeCheckpointer` writes."""
    tree = jax.tree.map(jnp.asarray, tree) if chunk_bytes else tree
    args = jax.tree.map(lambda _: old_ocp.SaveArgs(chunk_byte_size=chunk_bytes), tree)
    old_ocp.PyTreeCheckpointer(use_ocdbt=use_ocdbt).save(directory, tree, save_args=args)


def write_standard(directory: pathlib.Path, tree: dict) -> None:
    """As `StandardCheckpointer` writes, which DeepMind's own library uses."""
    with old_ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)


def write_new(directory: pathlib.Path, tree: dict, use_ocdbt: bool = True, use_zarr3: bool = True) -> None:
    """As the second interface of Orbax writes: the arrays lie in a directory of their own."""
    context = ocp.Context()
    context.array.saving.use_ocdbt = use_ocdbt
    context.array.saving.use_zarr3 = use_zarr3
    with context:
        ocp.save(directory, tree)
