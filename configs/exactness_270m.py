"""Exactness on the real Gemma 3 270M: 18 layers, a sliding window of 512, K/V blocks of 128 slots."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = "package:gemma-3-270m"
    config.dtype = "bfloat16"
    config.seed = 0
    config.width = 16
    config.kv_block = 128
    # graft_exactness
    config.capacity = 1280
    config.samples = 50
    config.min_tokens = 2
    config.max_tokens = 1200
    config.decode_steps = 16
    # schedule_invariance
    config.schedules = 200
    config.text_tokens = 650
    config.capacities = (768, 896, 1280)
    config.single_steps = 64
    return config
