"""Exactness on the real Gemma 3 270M: 18 layers, a sliding window of 512, K/V blocks of 128 slots.

What: `graft_exactness` compares fresh contexts with grafts in a new process; `schedule_invariance` reads one text in
random ways. Every hash must agree, KL must be 0.0, and every detector must fire. One run is one dtype.

Commands (each with a new or empty folder):
  python -m experiments.graft_exactness --config=configs/exactness_270m.py --out=out/graft_bf16
  python -m experiments.graft_exactness --config=configs/exactness_270m.py --config.dtype=float32 --out=out/graft_f32
  python -m experiments.schedule_invariance --config=configs/exactness_270m.py --out=out/schedules
  python -m experiments.schedule_invariance --config=configs/exactness_270m.py --config.schedules=50
    --config.dtype=float32 --out=out/schedules_f32

Expected: samples 50, each count 50, kl_nats_max 0.0; distinct_hashes 1 and five detectors true.
Time, measured on two cores beside other work: graft_exactness in bfloat16 237 s, in float32 360 s;
schedule_invariance in bfloat16 858 s for 200 schedules, in float32 327 s for 50.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = "package:gemma-3-270m"
    config.dtype = "bfloat16"
    config.seed = 0
    config.width = 10
    config.kv_block = 128
    # graft_exactness
    config.capacity = 1280
    config.samples = 50
    config.min_tokens = 2
    config.max_tokens = 1200
    config.spread_tokens = 1200
    config.decode_steps = 16
    # schedule_invariance
    config.schedules = 200
    config.text_tokens = 650
    config.capacities = (768, 896, 1280)
    config.single_steps = 64
    return config
