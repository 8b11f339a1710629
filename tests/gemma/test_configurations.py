"""The released sizes: parameter counts, layer kinds, scales; the decoder has the parameters that loaders fill."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.checkpoints import random as random_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations, products, rotary, transformer
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.runtime import step as step_lib

PARAMETERS = {
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "gemma-4-e2b": 4_628_569_344,
    "gemma-4-e4b": 7_463_013_376,
    "gemma-4-12b": 11_907_350_272,
    "gemma-4-31b": 30_697_345_280,
    "gemma-4-26b-a4b": 25_233_141_760,
}
FULL_LAYERS = {  # number of layers, and the last full one
    "gemma-3-270m": (18, 17),
    "gemma-3-1b": (26, 23),
    "gemma-3-4b": (34, 29),
    "gemma-3-12b": (48, 47),
    "gemma-3-27b": (62, 59),
    "gemma-4-e2b": (35, 34),
    "gemma-4-e4b": (42, 41),
    "gemma-4-12b": (48, 47),
    "gemma-4-31b": (60, 59),
    "gemma-4-26b-a4b": (30, 29),
}


def abstract_init(config: config_lib.GemmaConfig, dtype: np.dtype):
    """Shapes and dtypes of what Flax would initialise; allocates nothing."""
    model = transformer.Transformer(config, dtype, 16)

    def init():
        cache = cache_lib.make_cache(config, 2, 16, dtype)
        pair = (jnp.zeros((32, a.head_dim // 2), dtype) for a in (config.sliding, config.full))
        tables = rotary.RotaryTables(*(rotary.RotaryTable(rows, rows) for rows in pair))
        lanes = jax.tree.map(jnp.asarray, step_lib.lay_out((), ((0, 1),), 8, 16))
        return model.init(jax.random.key(0), lanes, tables, cache)

    return jax.eval_shape(init)["params"]


def assert_layout(config: config_lib.GemmaConfig, dtype: np.dtype) -> None:
    """Compares what the decoder would initialise with the table of parameters."""
    wanted = {
        p.path: p.leaf([jax.ShapeDtypeStruct(shape, dtype) for shape in p.chunk_shapes])
        for p in parameters_lib.parameters(config)
    }
    found = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract_init(config, dtype))
    assert found == parameters_lib.nest(wanted)


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_the_layout_has_as_many_parameters_as_published(name):
    # The published counts leave out the layer scalars, which are buffers there.
    found = parameters_lib.parameters(configurations.get(name))
    assert sum(math.prod(p.shape) for p in found if not p.path.endswith("layer_scalar")) == PARAMETERS[name]


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_the_decoder_has_the_parameters_of_the_layout(name):
    """Six layers hold both attention kinds; where layers share keys and values, twelve hold shared ones of both."""
    config = configurations.get(name)
    cut = random_lib.cut(config, layers=12 if config.num_kv_shared_layers else 6)
    assert len({(kind, layer < cut.num_kv_layers) for layer, kind in enumerate(cut.layer_kinds)}) == (
        4 if config.num_kv_shared_layers else 2
    )
    for dtype in ("bfloat16", "float32"):
        assert_layout(cut, jnp.dtype(dtype))


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_no_product_sums_more_than_a_library_takes_in_one_piece(name):
    for p in parameters_lib.parameters(configurations.get(name)):
        shapes = p.chunk_shapes
        if p.summed:
            axis, *_ = p.summed
            assert max(math.prod(shape[a] for a in p.summed) for shape in shapes) <= products.LONGEST
            assert sum(shape[axis] for shape in shapes) == p.shape[axis]
            rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
            assert rest == {(*p.shape[:axis], *p.shape[axis + 1 :])}
        else:
            assert shapes == (p.shape,)


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_layer_kinds(name):
    config = configurations.get(name)
    full = [layer for layer, kind in enumerate(config.layer_kinds) if kind == config_lib.FULL]
    assert (config.num_layers, full[-1]) == FULL_LAYERS[name]
    assert full == list(range(full[0], config.num_layers, full[0] + 1))


def test_27b_scales_queries_by_168():
    config = configurations.get("gemma-3-27b")
    assert config.query_scale == 168**-0.5 and config.full.head_dim == 128


def test_small_sizes_have_no_rotary_scale_and_a_short_window():
    for name in ("gemma-3-270m", "gemma-3-1b"):
        config = configurations.get(name)
        assert config.full.rotary.scale == 1 and config.sliding.window == 512
    assert configurations.get("gemma-3-4b").full.rotary.scale == 8


def test_unknown_name_lists_the_known():
    with pytest.raises(errors.ConfigError, match="gemma-3-270m"):
        configurations.get("gemma-9-1b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3, "sliding": config_lib.AttentionConfig(2, 8, config_lib.RotaryConfig(1e4), 4)}, "num_heads"),
        ({"layer_kinds": ()}, "layer_kinds"),
        ({"layer_kinds": ("linear",)}, "layer_kinds"),
        ({"full": config_lib.AttentionConfig(1, 8, config_lib.RotaryConfig(1e4), 4)}, "window"),
        ({"final_softcap": 0.0}, "final_softcap"),
        ({"embed_dim": 0}, "embed_dim"),
        ({"per_layer": config_lib.PerLayerConfig(262_143, 8)}, "per_layer.vocab_size: got 262143, wanted 262144 or"),
        ({"suppress_ids": (5, 262_144)}, r"suppress_ids: got \(5, 262144\), wanted ids below 262144"),
        ({"vocab_size": 3, "suppress_ids": (2, 0, 1, 1)}, "suppress_ids: got all 3 ids"),
    ],
)
def test_impossible_configurations(change, message):
    with pytest.raises(errors.ConfigError, match=message):
        dataclasses.replace(configurations.get("gemma-3-270m"), **change)


def test_per_layer_embeddings_have_a_width():
    for dim in (0, -1):
        with pytest.raises(errors.ConfigError, match=f"per_layer.dim: got {dim}, wanted 1 or more"):
            config_lib.PerLayerConfig(262_144, dim)


def test_odd_head_width_and_tiny_window():
    with pytest.raises(errors.ConfigError, match="head_dim: got 7"):
        config_lib.AttentionConfig(1, 7, config_lib.RotaryConfig(1e4))
    with pytest.raises(errors.ConfigError, match="window: got 1"):
        config_lib.AttentionConfig(1, 8, config_lib.RotaryConfig(1e4), 1)


def test_documents_are_json_and_nameless():
    document = configurations.get("gemma-3-270m").document()
    assert "name" not in document and document["sliding"]["window"] == 512


@pytest.mark.parametrize("name", configurations.CONFIGURATIONS)
def test_the_bytes_of_a_cache_are_those_of_its_arrays(name):
    config, dtype = configurations.get(name), jnp.dtype(jnp.bfloat16)
    arrays = jax.tree.leaves(jax.eval_shape(lambda: cache_lib.make_cache(config, 3, 128, dtype)))
    assert cache_lib.device_bytes(config, 3, 128, dtype) == sum(a.size * a.dtype.itemsize for a in arrays)
