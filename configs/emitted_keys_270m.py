"""Keys that the real Gemma 3 270M emits on real text, moved to other positions.

What: 34 texts of 1,024 tokens give 104,346 keys of full layers and 521,730 of sliding ones, the first token aside.
Each is moved by d and compared with the fresh one, pair by pair and as a whole head of 128 pairs.

Command (with a new or empty folder):
  python -m experiments.emitted_keys --config=configs/emitted_keys_270m.py --out=out/emitted_keys

Expected: seven checks hold; whole_keys_back_by_luck 0; a rotation by 0 changes 54,050 and 34,109 keys, in the signs of
zeros.
Time, measured on two cores: 243 s.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = "package:gemma-3-270m"
    config.dtype = "bfloat16"
    config.shapes = (2, 10, 32, 256)
    config.kv_block = 128
    config.texts = 34
    config.text_tokens = 1024
    config.min_keys = 100_000
    config.shifts = (0, 1, 2, 8, 16, 128, 1024, 4096)
    config.best_position = 1000
    config.best_shifts = (1, 128)
    return config
