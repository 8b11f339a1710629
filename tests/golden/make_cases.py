"""Makes golden cases from transformers: tiny random models with reference logits that no order of summation changes.

Run in the environment of the peers (`requirements-peers.txt` in `.venv-peers`), which has torch and transformers:

  .venv-peers/bin/python tests/golden/make_cases.py wide_31b wide_e2b
  .venv-peers/bin/python tests/golden/make_cases.py mine --config config.json --length 100
  .venv-peers/bin/python tests/golden/make_cases.py long_26b --max-seeds 0 --first-seed 9

A bfloat16 result depends on the order in which a float32 sum is taken: now and then a sum lies so near to the middle
of two bfloat16 numbers that another order rounds the other way, and the change spreads. So seeds are searched until
torch's own kernels and sums in float32, in float64, in reversed order and in shuffled ones give the same bfloat16
logits. Random weights have two significant bits, which makes most of their sums exact, and post-norms are small, which
lets changes die out. With `--max-seeds 0` there is no search; such a case (`is_order_free` false) is for comparison
layer by layer. Seeds for which a router has to choose between equal experts are passed over always: torch breaks such
ties either way, so a case with one says nothing about the rule, which is here the lowest number.

A case is an .npz file: `input_ids`, `w/<public name>`, `hidden_states_f32` and `hidden_states_bf16` (embeddings, then
the stream after each layer, after the last one normed), `logits_f32`, `logits_bf16`, `hf_config_json`, `seed`,
`is_order_free` and `how`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
import itertools
import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
PLAIN, FLOAT32, FLOAT64, REVERSED = "plain", "float32", "float64", "reversed"
SHUFFLED = tuple(f"shuffled {number}" for number in range(8))
POST_NORM = 0.25  # Size of the norms on a branch's output, which is then added to the stream.
QUERY_KEY_NORM = 0.35  # Size of the norms of queries and keys: logits of attention stay small at wide heads.

_GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 24,
    "max_position_embeddings": 256,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}
_S, _F = "sliding_attention", "full_attention"

# What a case is made of, and how many tokens it has.
CASES = {
    "wide_31b": (
        _GEMMA4
        | {
            "layer_types": [_S, _S, _F],
            "num_attention_heads": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        80,
    ),
    "wide_e2b": (
        _GEMMA4
        | {
            "layer_types": [_S, _F, _S, _F],
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 97,
        },
        80,
    ),
    "long_26b": (
        _GEMMA4
        | {
            "layer_types": [_S, _F],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        120,
    ),
}


@contextlib.contextmanager
def accumulating(order: str) -> Iterator[None]:
    """Takes every sum of a forward pass, in matrix products, norms and softmax, in the given order or width."""
    linear, matmul, softmax, mean = (
        torch.nn.functional.linear,
        torch.matmul,
        torch.nn.functional.softmax,
        torch.Tensor.mean,
    )
    wide = torch.float64 if order == FLOAT64 else torch.float32

    def places(length: int) -> torch.Tensor:
        if order == REVERSED:
            return torch.arange(length - 1, -1, -1)
        if order in SHUFFLED:
            return torch.randperm(length, generator=torch.Generator().manual_seed(SHUFFLED.index(order)))
        return torch.arange(length)

    def ordered(x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.index_select(axis, places(x.shape[axis])).to(wide)

    def my_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(ordered(a, a.ndim - 1), ordered(b, b.ndim - 2)).to(torch.float32).to(a.dtype)

    def my_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert bias is None
        return my_matmul(x, weight.T)

    def my_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        p = softmax(ordered(x, dim), dim=dim, dtype=wide).to(dtype)
        return p.index_select(dim, torch.argsort(places(x.shape[dim])))

    def my_mean(x: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
        return mean(ordered(x, dim), dim, keepdim=keepdim).to(x.dtype)

    if order == PLAIN:
        yield
        return
    torch.nn.functional.linear, torch.matmul = my_linear, my_matmul
    torch.nn.functional.softmax, torch.Tensor.mean = my_softmax, my_mean
    try:
        yield
    finally:
        torch.nn.functional.linear, torch.matmul = linear, matmul
        torch.nn.functional.softmax, torch.Tensor.mean = softmax, mean


def random_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Returns a weight that is a bfloat16 number: of two significant bits in a matrix, of four near 1 elsewhere."""
    normal = rng.standard_normal(shape)
    if len(shape) == 1:
        size = POST_NORM if "post_" in name else QUERY_KEY_NORM if "q_norm" in name or "k_norm" in name else 1.0
        values, bits = size * (1 + 0.25 * np.clip(normal, -3, 3)), 4
    else:
        values, bits = normal * shape[-1] ** -0.5, 2
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2**bits), exponent - bits).astype(np.float32)


def build(config: transformers.PreTrainedConfig, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Returns the model in `dtype`, loaded from a file: casting a model would cast its rotary frequencies too."""
    eager = {"attn_implementation": "eager"}
    if getattr(config, "enable_moe_block", False):
        eager["experts_implementation"] = "eager"
    with tempfile.TemporaryDirectory() as directory:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **eager)
    return model.eval()


def fill(model: transformers.PreTrainedModel, weights: dict[str, np.ndarray]) -> None:
    """Puts `weights` into the model."""
    for name, tensor in stored(model).items():
        tensor.copy_(torch.from_numpy(weights[name]))


def stored(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns what a checkpoint of the model holds, the head left out, which is the embedding."""
    return {name: tensor for name, tensor in sorted(model.state_dict().items()) if name != "lm_head.weight"}


def forward(model: transformers.PreTrainedModel, ids: np.ndarray, order: str) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [L + 1, T, D] and logits [T, V] as float32."""
    with torch.no_grad(), accumulating(order):
        result = model(torch.from_numpy(ids)[None], output_hidden_states=True, use_cache=False)
    return torch.cat(result.hidden_states).float().numpy(), result.logits[0].float().numpy()


@contextlib.contextmanager
def router_logits(model: transformers.PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collects the logits of all routers."""
    found: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("router.proj")]
    hooks = [router.register_forward_hook(lambda _, __, output: found.append(output)) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def has_tie(logits: list[torch.Tensor], top_k: int | None) -> bool:
    """Returns whether a router chose between equal experts, which torch does in no specified way."""
    largest = [torch.sort(layer.float(), dim=-1, descending=True).values for layer in logits]
    return any(bool((layer[..., top_k - 1] == layer[..., top_k]).any()) for layer in largest)


def make(name: str, config: transformers.PreTrainedConfig, length: int, first_seed: int, max_seeds: int) -> None:
    """Searches a seed and writes the case; exits where no seed is found."""
    exact, rounded = build(config, torch.float32), build(config, torch.bfloat16)
    seeds = range(first_seed, first_seed + max_seeds) if max_seeds else itertools.count(first_seed)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        weights = {key: random_weight(key, tuple(tensor.shape), rng) for key, tensor in stored(exact).items()}
        ids = rng.integers(3, config.vocab_size, length)
        fill(rounded, weights)
        with router_logits(rounded) as chosen_from:
            states, logits = forward(rounded, ids, PLAIN)
        if has_tie(chosen_from, getattr(config, "top_k_experts", None)):
            continue
        orders = (FLOAT64, REVERSED, *SHUFFLED, FLOAT32)
        is_order_free = all(np.array_equal(forward(rounded, ids, order)[1], logits) for order in orders)
        print(f"{name}: seed {seed}: {'free of' if is_order_free else 'depends on'} the order of sums", flush=True)
        if is_order_free or not max_seeds:
            break
    else:
        raise SystemExit(f"{name}: no seed of {max_seeds} gives the same logits in every order; take a smaller case")
    fill(exact, weights)
    states_f32, logits_f32 = forward(exact, ids, PLAIN)
    document = json.loads(config.to_json_string())
    path = HERE / f"{name}.npz"
    np.savez_compressed(
        path,
        input_ids=ids.astype(np.int32),
        hidden_states_f32=states_f32,
        hidden_states_bf16=states,
        logits_f32=logits_f32,
        logits_bf16=logits,
        hf_config_json=json.dumps(document, indent=2),
        seed=seed,
        is_order_free=is_order_free,
        how=f"transformers {transformers.__version__}, torch {torch.__version__}, eager attention and experts, CPU",
        **{f"w/{key}": value for key, value in weights.items()},
    )
    print(f"{path.name}: seed {seed}, {length} tokens, {path.stat().st_size} bytes")


def main() -> None:
    """Makes the cases named on the command line."""
    parser = argparse.ArgumentParser(description="Makes golden cases from transformers.")
    parser.add_argument("names", nargs="+", help=f"one of {', '.join(CASES)}, or any name with --config")
    parser.add_argument("--config", type=pathlib.Path, help="config.json of a tiny model")
    parser.add_argument("--length", type=int, help="number of tokens")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--max-seeds", type=int, default=2000, help="0 takes the first seed without a search")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    for name in flags.names:
        values, length = (json.loads(flags.config.read_text()), 0) if flags.config else CASES[name]
        values = dict(values)
        values.setdefault("num_hidden_layers", len(values["layer_types"]))
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        make(name, config, flags.length or length, flags.first_seed, flags.max_seeds)


if __name__ == "__main__":
    main()
