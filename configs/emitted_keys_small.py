"""Keys that a small random model emits, moved to other positions, for a first look and for the tests.

Command (with a new or empty folder):
  python -m experiments.emitted_keys --config=configs/emitted_keys_small.py --out=out/emitted_keys_small

Expected: as `emitted_keys_270m`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = (
        "random:gemma-3-270m?seed=0&layers=6&vocab=512&embed=64&hidden=128&heads=2&kv_heads=1&head_dim=128&window=32"
    )
    config.dtype = "bfloat16"
    config.shapes = (2, 10)
    config.kv_block = 32
    config.texts = 32
    config.text_tokens = 64
    config.min_keys = 2000
    config.shifts = (0, 1, 16, 1024)
    config.best_position = 1000
    config.best_shifts = (1, 128)
    return config
