"""The router: which experts it chooses where probabilities are equal, and their weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import experts


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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_experts_with_equal_probability_the_lowest_number_is_chosen(logits_E, chosen, dtype):
    logits_E = np.array(logits_E, np.float32)
    router = experts.Router(config_lib.ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8), eps=1e-6)
    # One input of 1, whose norm is 1: its row of the projection is the logits, times 1/sqrt(1).
    params = {
        "scale": jnp.ones(1, dtype),
        "per_expert_scale": jnp.ones(4, dtype),
        "proj": {"kernel": (jnp.asarray(logits_E, dtype).reshape(1, 4),)},
    }
    is_chosen_TxE, weight_TxE = router.apply({"params": params}, jnp.ones((1, 1), dtype))
    assert tuple(np.flatnonzero(np.asarray(is_chosen_TxE)[0])) == chosen
    p_P = np.exp(logits_E[list(chosen)])
    np.testing.assert_allclose(np.asarray(weight_TxE)[0, list(chosen)], p_P / p_P.sum(), rtol=1e-2)
