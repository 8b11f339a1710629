"""The router: its choice where probabilities are equal, its weights, its bits; and what the experts' program holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import configurations, experts

DTYPES = ("bfloat16", "float32")


def small_router(logits_E: np.ndarray, expert_scale_E: np.ndarray, dtype: str, top_k: int = 2):
    """Returns the choice and the weights for one input of 1, whose norm is 1: its projection is the logits."""
    router = experts.Router(config_lib.ExpertsConfig(num_experts=len(logits_E), top_k=top_k, hidden_dim=8), eps=1e-6)
    params = {
        "scale": jnp.ones(1, dtype),
        "per_expert_scale": jnp.asarray(expert_scale_E, dtype),
        "proj": {"kernel": (jnp.asarray(logits_E, dtype).reshape(1, -1),)},
    }
    is_chosen_TxE, weight_TxE = router.apply({"params": params}, jnp.ones((1, 1), dtype))
    return np.asarray(is_chosen_TxE)[0], np.asarray(weight_TxE)[0]


@pytest.mark.parametrize(
    ("logits_E", "chosen"),
    [
        ([0, 0, 0, 0], (0, 1)),
        ([0, 2, 1, 1], (1, 2)),
        ([1, 0, 1, 1], (0, 2)),
        ([0, 1, 2, 1], (1, 2)),
        ([-1, -1, -2, -1], (0, 1)),
        ([3, 1, 2, 0], (0, 2)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_experts_with_equal_probability_the_lowest_number_is_chosen(logits_E, chosen, dtype):
    logits_E = np.array(logits_E, np.float32)
    is_chosen_E, weight_E = small_router(logits_E, np.ones(4), dtype)
    assert tuple(np.flatnonzero(is_chosen_E)) == chosen
    p_P = np.exp(logits_E[list(chosen)])
    np.testing.assert_allclose(weight_E[list(chosen)], p_P / p_P.sum(), rtol=1e-2)


def test_an_experts_own_scale_multiplies_its_weight_whatever_its_sign():
    logits_E, scale_E = np.array([0, 2, 1, -1], np.float32), np.array([3, -2, 0.5, 7], np.float32)
    is_chosen_E, weight_E = small_router(logits_E, scale_E, "float32")
    p_P = np.exp(logits_E[1:3])
    assert is_chosen_E.tolist() == [False, True, True, False]
    np.testing.assert_allclose(weight_E, [0, *(p_P / p_P.sum() * scale_E[1:3]), 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_experts_and_weights_do_not_depend_on_the_other_tokens(dtype):
    model = configurations.get("gemma-4-26b-a4b")
    router, rng = experts.Router(model.experts, eps=model.norm_eps), np.random.default_rng(0)
    shapes = jax.eval_shape(router.init, jax.random.key(0), jnp.zeros((2, model.embed_dim), dtype))["params"]
    params = jax.tree.map(lambda leaf: jnp.asarray(0.05 * rng.standard_normal(leaf.shape), dtype), shapes)
    params["scale"], params["per_expert_scale"] = (1 + params[name] for name in ("scale", "per_expert_scale"))
    x_TxD = jnp.asarray(rng.standard_normal((256, model.embed_dim)), dtype)
    compute = jax.jit(lambda x_TxD: router.apply({"params": params}, x_TxD))
    wanted = [np.asarray(part) for part in compute(x_TxD)]
    assert (wanted[0].sum(1) == model.experts.top_k).all()
    for count in (2, 7, 16, 33):
        for found, part in zip(compute(x_TxD[:count]), wanted, strict=True):
            assert np.asarray(found).tobytes() == part[:count].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_lanes", [2, 64])
def test_the_experts_program_holds_few_of_them_at_a_time(num_lanes, dtype):
    config = config_lib.ExpertsConfig(num_experts=64, top_k=2, hidden_dim=128)
    layer, shape = experts.Experts(config), (num_lanes, 512)
    given = (
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((num_lanes, 64), bool),
        jax.ShapeDtypeStruct((num_lanes, 64), jnp.float32),
        jax.ShapeDtypeStruct((num_lanes,), bool),
    )
    params = jax.eval_shape(layer.init, jax.random.key(0), *given)
    in_float32 = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    memory = jax.jit(layer.apply).lower(params, *given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < in_float32 / 8
