"""Rotary exactness in full: four encodings, four ways to store keys, positions up to 130,000.

What: Gaussian keys are stored at one position and moved to another; every bit is compared with a fresh computation.
Beside it: exhaustive counts of transports, compositions and decoders, and shifts of logits and values of a small model.

Command (with a new or empty folder):
  python -m experiments.rotary_exactness --config=configs/rotary_exactness.py --out=out/rotary

Expected: own_position_mismatches 0, and all 21 checks hold.
Time, measured on two cores: 164 s, 2.4 GB.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    # Keys: the encodings of heads that are 256 and 512 wide, and the schemes of kvgraft_jax/relocation/keys.py.
    config.encodings = ("local256", "g3global256", "g3global256s8", "global512p")
    config.schemes = ("engine bf16", "bf16, f32 arithmetic", "engine f32", "f32 of bf16 keys")
    config.num_keys = 2048
    config.num_positions = 131_072
    # By every method; back by 1 and 2 to position 0 is where most keys survive.
    config.moves = (
        *((0, 1000), (1, -1), (2, -2), (1, 1), (1000, 1)),
        *((1000, 1000), (30_000, 2000), (100_000, 30_000)),
    )
    config.swept_position = 1000  # Moved by 0, 1, 2, 4, ... both ways, as far as the table goes.
    # Tables.
    config.f32_positions = 131_072
    config.bf16_positions = 4096
    # What the engine's float32 program decides, and rows of the tables.
    config.program_shifts = 262_144
    config.program_positions = 8192
    config.row_positions = 262_144
    # Values of a random model whose positions are shifted as a whole.
    config.model = (
        "random:gemma-3-270m?seed=0&layers=6&vocab=512&embed=640&hidden=512&heads=4&kv_heads=1&head_dim=64&window=32"
    )
    config.dtype = "bfloat16"
    config.text_tokens = 96
    config.value_shifts = (0, 1, 2, 8, 16, 128, 1024, 4096, 30_000)
    return config
