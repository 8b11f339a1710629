"""Rotary exactness for a first look and for the tests: the same study with fewer keys and positions below 4,200.

Command (with a new or empty folder):
  python -m experiments.rotary_exactness --config=configs/rotary_small.py --out=out/rotary_small

Expected: as in `rotary_exactness`.
Time, measured on two cores beside other work: 23 to 34 s.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.encodings = ("local256", "g3global256", "g3global256s8", "global512p")
    config.schemes = ("engine bf16", "bf16, f32 arithmetic", "engine f32", "f32 of bf16 keys")
    config.num_keys = 128
    config.num_positions = 4200
    config.moves = ((0, 1000), (1, -1), (1, 1), (1000, 1), (1000, 1000), (3000, 1000))
    config.swept_position = 1000
    config.f32_positions = 4096
    config.bf16_positions = 1024
    # What the engine's float32 program decides, and rows of the tables.
    config.program_shifts = 2048
    config.program_positions = 256
    config.row_positions = 2048
    config.model = (
        "random:gemma-3-270m?seed=0&layers=3&vocab=512&embed=64&hidden=128&heads=4&kv_heads=1&head_dim=16&window=32"
    )
    config.dtype = "bfloat16"
    config.text_tokens = 60
    config.value_shifts = (0, 1, 16, 1024)
    return config
