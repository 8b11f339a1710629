"""A deposit moved to other positions: the real Gemma 3 270M, real text, both dtypes, window of 512 full or not.

What: documents of 256 and 1,024 tokens are deposited at position 0 and moved by d, their keys in three ways; keys,
values and the logits of 16 following tokens are compared with contexts fresh at d, and those with contexts fresh at 0.

Command (with a new or empty folder):
  python -m experiments.relocation --config=configs/relocation_270m.py --out=out/relocation

Expected: nine checks hold; 0 bits and KL 0.0 at d = 0, copied or kept before rotation, and neither at any other d. A
moved deposit is as far from a fresh context as two fresh ones are from each other: mean KL 0.0014 beside the probe's
0.0014 in bfloat16, 2e-10 beside 4e-10 in float32.
Time, measured on two cores: 488 s.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = "package:gemma-3-270m"
    config.dtype = "bfloat16"
    config.other_dtypes = ("float32",)
    config.seed = 0
    config.shapes = (2, 10, 32, 256)
    config.kv_block = 128
    config.document_tokens = (256, 1024)
    config.documents = 2
    config.tail_tokens = 16
    config.shifts = (0, 1, 2, 8, 16, 128, 1024, 4096)
    config.small_shift = 16
    return config
