"""What the parity tests must see: known mistakes of porters, made on purpose, each of which changes bfloat16 logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import attention as attention_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import experts as experts_lib
from kvgraft_jax.gemma import layers, per_layer, rotary
from tests import golden_cases

WIDTH, KV_BLOCK = 24, 32  # All tokens of a tiny case in one step.
BF16 = "bfloat16"


def equal_share(
    name: str,
    *,
    config: config_lib.GemmaConfig | None = None,
    leaves: Mapping[str, jax.Array] | None = None,
    rotary_config: config_lib.GemmaConfig | None = None,
    is_patched: bool = False,
) -> float:
    """Share of the logits that stay bit-identical to the reference's with these changes."""
    case = golden_cases.load(name)
    make = golden_cases.build if is_patched else golden_cases.shared_program
    program = make(config or case.config, BF16, KV_BLOCK)
    params = case.params(BF16) if leaves is None else case.tree(leaves)
    logits_TxV, _ = program.run(params, case.token_ids, [(WIDTH, WIDTH)], rotary_config=rotary_config)
    return float(np.mean(logits_TxV == case.arrays["logits_bf16"]))


def _sliding(config: config_lib.GemmaConfig, **changes) -> config_lib.GemmaConfig:
    return dataclasses.replace(config, sliding=dataclasses.replace(config.sliding, **changes))


def _rotary(config: config_lib.GemmaConfig, kind: str, **changes) -> config_lib.GemmaConfig:
    attention = getattr(config, kind)
    changed = dataclasses.replace(attention, rotary=dataclasses.replace(attention.rotary, **changes))
    return dataclasses.replace(config, **{kind: changed})


WRONG_CONFIGS = {
    "gemma3: window too small": lambda c: _sliding(c, window=c.sliding.window - 1),
    "gemma3: window too large": lambda c: _sliding(c, window=c.sliding.window + 1),
    "e2b: window too large": lambda c: _sliding(c, window=c.sliding.window + 1),
    "wide_31b: window too large": lambda c: _sliding(c, window=c.sliding.window + 1),
    "wide_31b: window too small": lambda c: _sliding(c, window=c.sliding.window - 1),
    "gemma3: w instead of 1 + w": lambda c: dataclasses.replace(c, norm_plus_one=False),
    "31b: 1 + w instead of w": lambda c: dataclasses.replace(c, norm_plus_one=True),
    "gemma3: scale from head width": lambda c: dataclasses.replace(c, query_scale=c.full.head_dim**-0.5),
    "31b: scale from head width": lambda c: dataclasses.replace(c, query_scale=c.sliding.head_dim**-0.5),
    "gemma3: all layers slide": lambda c: dataclasses.replace(c, layer_kinds=(config_lib.SLIDING,) * c.num_layers),
    "31b: values not normed": lambda c: dataclasses.replace(c, value_norm=False),
    "31b: no layer scalar": lambda c: dataclasses.replace(c, layer_scalar=False),
}


@pytest.mark.parametrize("mistake", WRONG_CONFIGS)
def test_wrong_configuration(mistake):
    name = mistake.partition(":")[0]
    config = WRONG_CONFIGS[mistake](golden_cases.load(name).config)
    assert equal_share(name, config=config) < 0.5


def test_no_softcap():
    config = dataclasses.replace(golden_cases.load("31b").config, final_softcap=None)
    assert equal_share("31b", config=config) < 0.95  # These logits are small.


WRONG_ROTARY = {
    "gemma3: no linear scale": lambda c: _rotary(c, "full", scale=1.0),
    "gemma3: local base is global base": lambda c: _rotary(c, "sliding", base=c.full.rotary.base),
    "31b: whole head rotates": lambda c: _rotary(c, "full", fraction=1.0),
    "31b: global base is local base": lambda c: _rotary(c, "full", base=c.sliding.rotary.base),
}


@pytest.mark.parametrize("mistake", WRONG_ROTARY)
def test_wrong_rotary_configuration(mistake):
    name = mistake.partition(":")[0]
    assert equal_share(name, rotary_config=WRONG_ROTARY[mistake](golden_cases.load(name).config)) < 0.5


def test_rotated_width_as_denominator(monkeypatch):
    def frequencies(head_dim, config):
        rotated = int(config.fraction * head_dim)
        frequency_R = config.base ** (-np.arange(0, rotated, 2) / rotated)
        return np.pad(frequency_R, (0, (head_dim - rotated) // 2)).astype(np.float32)

    monkeypatch.setattr(rotary, "rotary_frequencies", frequencies)
    assert equal_share("31b") < 0.5


def _interleaved(x_TxNxH, cos_TxR, sin_TxR):
    """Pairs (2i, 2i + 1) instead of (i, i + R)."""
    num_pairs = x_TxNxH.shape[-1] // 2
    places = np.arange(2 * num_pairs).reshape(num_pairs, 2).T.reshape(-1)
    turned_TxNxH = ROTATE(x_TxNxH[..., places], cos_TxR, sin_TxR)
    return turned_TxNxH[..., np.argsort(places)]


def _leading_block(x_TxNxH, cos_TxR, sin_TxR):
    """Proportional rotation within the first quarter of the head, the rest passing through."""
    width = x_TxNxH.shape[-1]
    if width != golden_cases.load("31b").config.full.head_dim:
        return ROTATE(x_TxNxH, cos_TxR, sin_TxR)
    first_TxNxH, rest_TxNxH = x_TxNxH[..., : width // 4], x_TxNxH[..., width // 4 :]
    first_TxNxH = ROTATE(first_TxNxH, cos_TxR[:, : width // 8], sin_TxR[:, : width // 8])
    return jnp.concatenate([first_TxNxH, rest_TxNxH], axis=-1)


ROTATE = rotary.rotate


@pytest.mark.parametrize("rotate", [_interleaved, _leading_block])
def test_wrong_rotation(monkeypatch, rotate):
    monkeypatch.setattr(rotary, "rotate", rotate)
    assert equal_share("31b", is_patched=True) < 0.5


DONORS = {
    "as many layers before": lambda config, layer: layer - config.num_kv_shared_layers,
    "the first of its kind": lambda config, layer: config.layer_kinds.index(config.layer_kinds[layer]),
}


@pytest.mark.parametrize("donor", DONORS)
def test_wrong_donor(monkeypatch, donor):
    def kv_layer(config, layer):
        return layer if layer < config.num_kv_layers else DONORS[donor](config, layer)

    monkeypatch.setattr(config_lib.GemmaConfig, "kv_layer", kv_layer)
    assert equal_share("e2b", is_patched=True) < 0.5


@pytest.mark.parametrize(("name", "scale"), [("e2b", 2**-0.5), ("e2b", 48**-0.5), ("26b", 48**-0.5)])
def test_left_out_constant(monkeypatch, name, scale):
    """Per-layer embeddings without 2^(-1/2) or D^(-1/2), router without D^(-1/2)."""
    scaled = layers.scale_by
    monkeypatch.setattr(layers, "scale_by", lambda x, by: x if by == scale else scaled(x, by))
    assert equal_share(name, is_patched=True) < 0.5


def test_per_layer_table_not_scaled():
    leaves = dict(golden_cases.load("e2b").leaves(BF16))
    path = "per_layer_embedder/embedding"
    leaves[path] = leaves[path] / jnp.asarray(math.sqrt(leaves[path].shape[-1]), BF16)
    assert equal_share("e2b", leaves=leaves) < 0.5


def _swapped(first: str, second: str) -> Callable[[str], str]:
    return lambda path: path.replace(first, "!").replace(second, first).replace("!", second)


WRONG_PARAMETERS = {
    "26b: post-norms 1 and 2 swapped": (_swapped("post_dense_norm", "post_experts_norm"), None),
    "31b: norms after attention and before the MLP swapped": (
        _swapped("post_attention_norm", "pre_feedforward_norm"),
        None,
    ),
    "26b: no scale per expert": (str, ("per_expert_scale", lambda leaf: jnp.ones_like(leaf))),
    "26b: gate and up swapped": (str, ("gate_up", lambda leaf: jnp.roll(leaf, leaf.shape[-1] // 2, axis=-1))),
    "26b: no dense branch": (str, ("post_dense_norm", lambda leaf: jnp.zeros_like(leaf))),
}


@pytest.mark.parametrize("mistake", WRONG_PARAMETERS)
def test_wrong_parameters(mistake):
    name = mistake.partition(":")[0]
    rename, change = WRONG_PARAMETERS[mistake]
    leaves = {rename(path): leaf for path, leaf in golden_cases.load(name).leaves(BF16).items()}
    if change is not None:
        part, function = change
        leaves = {path: function(leaf) if part in path else leaf for path, leaf in leaves.items()}
    assert equal_share(name, leaves=leaves) < 0.5


def test_query_heads_tiled():
    """Query head n reads key/value head n mod K instead of n / G: here its weights move to such a place."""
    case = golden_cases.load("31b")
    num_heads, num_kv_heads = case.config.num_heads, case.config.sliding.num_kv_heads
    read_by = np.arange(num_heads).reshape(-1, num_kv_heads).T.reshape(-1)
    axes = {"q_proj": 1, "o_proj": 0}
    leaves = dict(case.leaves(BF16))
    for layer, kind in enumerate(case.config.layer_kinds):
        for part, axis in axes.items() if kind == config_lib.SLIDING else ():
            path = f"layer_{layer}/attention/{part}/kernel"
            leaves[path] = jnp.take(leaves[path], read_by, axis=axis)
    assert equal_share("31b", leaves=leaves) < 0.5


ACTIVATIONS = {
    "exact gelu": lambda x: nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype),
    "silu": lambda x: nn.silu(x.astype(jnp.float32)).astype(x.dtype),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_wrong_activation(monkeypatch, activation):
    monkeypatch.setattr(layers, "gelu", ACTIVATIONS[activation])
    assert equal_share("26b", is_patched=True) < 0.5


class Interceptor:
    """Makes one mistake where Flax calls a module: in its inputs, its outputs, or in what it is given beside them."""

    def __init__(self):
        self.notes: dict[str, jax.Array] = {}

    def __call__(self, call, args, kwargs, context):
        return call(*args, **kwargs)


class ValuesAfterKeyNorm(Interceptor):
    """Full layers take their values from the normed keys."""

    def __call__(self, call, args, kwargs, context):
        module = context.module
        if module.name == "v_norm" and module.parent.attention.values_are_keys:
            args = (module.parent.k_norm(*args),)
        return call(*args, **kwargs)


class ValuesAfterRotation(ValuesAfterKeyNorm):
    """Full layers take their values from the normed and rotated keys."""

    def __call__(self, call, args, kwargs, context):
        module = context.module
        if isinstance(module, attention_lib.Attention) and context.method_name == "__call__":
            self.notes["table"] = args[1]
        if module.name == "v_norm" and module.parent.attention.values_are_keys:
            table = self.notes["table"]
            args = (rotary.rotate(module.parent.k_norm(*args), table.cos_TxR, table.sin_TxR),)
        return call(*args, **kwargs)


class ScalarBeforePerLayerInput(Interceptor):
    """The layer scalar multiplies the stream before the per-layer input, not after."""

    def __call__(self, call, args, kwargs, context):
        module = context.module
        if not isinstance(module, per_layer.PerLayerInput) or context.method_name != "__call__":
            return call(*args, **kwargs)
        scalar = module.parent.layer_scalar[None]
        return (call(args[0] * scalar, args[1]).astype(jnp.float32) / scalar.astype(jnp.float32)).astype(BF16)


class UnscaledPerLayerContext(Interceptor):
    """The per-layer projection reads the embeddings before their scaling."""

    def __call__(self, call, args, kwargs, context):
        module = context.module
        if isinstance(module, per_layer.PerLayerEmbedder) and context.method_name == "__call__":
            chunks = [chunk_VxD[args[1]] for chunk_VxD in module.parent.embedder.embedding]
            args = (jnp.concatenate(chunks, axis=1), args[1])
        return call(*args, **kwargs)


class RouterAfterNorm(Interceptor):
    """The router reads the experts' normed input instead of the raw stream."""

    def __call__(self, call, args, kwargs, context):
        module = context.module
        if isinstance(module, experts_lib.Router) and context.method_name == "__call__":
            args = (module.parent.pre_experts_norm(*args),)
        return call(*args, **kwargs)


class NoRenormalisation(Interceptor):
    """The chosen experts' probabilities are not divided by their sum."""

    def weights(self, p_TxE: jax.Array, scale_E: jax.Array) -> jax.Array:
        return p_TxE * scale_E

    def __call__(self, call, args, kwargs, context):
        module, result = context.module, call(*args, **kwargs)
        if (
            context.method_name == "__call__"
            and isinstance(module.parent, experts_lib.Router)
            and module.name == "proj"
        ):
            self.notes["logits"] = result
        if not isinstance(module, experts_lib.Router) or context.method_name != "__call__":
            return result
        is_chosen_TxE, _ = result
        p_TxE = jnp.where(is_chosen_TxE, jax.nn.softmax(self.notes["logits"].astype(jnp.float32)), 0.0)
        scale_E = module.variables["params"]["per_expert_scale"].astype(jnp.float32)[None]
        return is_chosen_TxE, self.weights(p_TxE, scale_E)


class ScaleBeforeRenormalisation(NoRenormalisation):
    """The experts' own scales come before the division by the sum."""

    def weights(self, p_TxE: jax.Array, scale_E: jax.Array) -> jax.Array:
        return p_TxE * scale_E / jnp.sum(p_TxE * scale_E, axis=-1, keepdims=True)


INTERCEPTED = {
    "31b": (ValuesAfterKeyNorm, ValuesAfterRotation),
    "e2b": (ScalarBeforePerLayerInput, UnscaledPerLayerContext),
    "26b": (RouterAfterNorm, NoRenormalisation, ScaleBeforeRenormalisation),
}


@pytest.mark.parametrize(("name", "mistake"), [(name, m) for name, ms in INTERCEPTED.items() for m in ms])
def test_wrong_calculation(name, mistake):
    with nn.intercept_methods(mistake()):
        assert equal_share(name, is_patched=True) < 0.5


def test_interception_alone_changes_nothing():
    with nn.intercept_methods(Interceptor()):
        assert equal_share("26b", is_patched=True) == 1
