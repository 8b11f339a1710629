"""Exactness on a small random model: six layers (five sliding, one full), a window of 32, K/V blocks of 32 slots."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = (
        "random:gemma-3-270m?seed=0&layers=6&vocab=512&embed=256&hidden=512&heads=4&kv_heads=1&head_dim=32&window=32"
    )
    config.dtype = "bfloat16"
    config.seed = 0
    config.width = 16
    config.kv_block = 32
    # graft_exactness
    config.capacity = 256
    config.samples = 50
    config.min_tokens = 2
    config.max_tokens = 200
    config.decode_steps = 16
    # schedule_invariance
    config.schedules = 60
    config.text_tokens = 150
    config.capacities = (160, 192, 256)
    config.single_steps = 64
    return config
