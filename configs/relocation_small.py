"""A deposit moved to other positions: a small random model with a window of 32, for a first look and for the tests.

Command (with a new or empty folder):
  python -m experiments.relocation --config=configs/relocation_small.py --out=out/relocation_small

Expected: as `relocation_270m`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = (
        "random:gemma-3-270m?seed=0&layers=6&vocab=512&embed=64&hidden=128&heads=4&kv_heads=1&head_dim=64&window=32"
    )
    config.dtype = "bfloat16"
    config.other_dtypes = ("float32",)
    config.seed = 0
    config.shapes = (2, 10)
    config.kv_block = 32
    config.document_tokens = (20, 70)
    config.documents = 1
    config.tail_tokens = 4
    config.shifts = (0, 1, 16, 128, 1024)
    config.small_shift = 16
    return config
