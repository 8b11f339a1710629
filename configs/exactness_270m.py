"""Exactness on the real Gemma 3 270M: 18 layers, a sliding window of 512, K/V blocks of 128 slots.

What: `graft_exactness` compares fresh contexts with grafts in a new process; `schedule_invariance` reads one text in
random ways; `width_invariance` reads one in steps of many widths; `batch_invariance` runs sequences alone and beside
others. Every hash must agree, KL must be 0.0, and every detector must fire. One run is one dtype.

Commands (each with a new or empty folder):
  python -m experiments.graft_exactness --config=configs/exactness_270m.py --out=out/graft_bf16
  python -m experiments.graft_exactness --config=configs/exactness_270m.py --config.dtype=float32 --out=out/graft_f32
  python -m experiments.schedule_invariance --config=configs/exactness_270m.py --out=out/schedules
  python -m experiments.schedule_invariance --config=configs/exactness_270m.py --config.schedules=50
    --config.dtype=float32 --out=out/schedules_f32
  python -m experiments.width_invariance --config=configs/exactness_270m.py --out=out/widths
  python -m experiments.width_invariance --config=configs/exactness_270m.py --config.dtype=float32 --out=out/widths_f32
  python -m experiments.batch_invariance --config=configs/exactness_270m.py --out=out/batches
  python -m experiments.batch_invariance --config=configs/exactness_270m.py --config.dtype=float32 --out=out/batches_f32

Expected: samples 50, each count 50, kl_nats_max 0.0; distinct_hashes 1 and five detectors true; of the widths,
plans 111, distinct_hashes 1, configurations_equal 10, both detectors true; sequences 200, equal 200, four detectors
true.
Time, measured on two cores: graft_exactness in bfloat16 517 s, in float32 783 s; schedule_invariance in bfloat16
2,619 s for 200 schedules beside other work, in float32 832 s for 50; width_invariance in bfloat16 1,496 s, in float32
2,860 s, both beside other work; batch_invariance in bfloat16 3,605 s.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = "package:gemma-3-270m"
    config.dtype = "bfloat16"
    config.seed = 0
    config.shapes = (2, 10, 32, 256)
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
    # width_invariance: each width alone reads the whole text, which crosses the window four times.
    config.width_shapes = (2, 3, 4, 7, 8, 10, 16, 33, 64, 128, 256)
    config.width_plans = 100
    config.width_tokens = 2100
    # Every released size in its true widths, with the fewest layers that hold both attention kinds, and layers of both
    # that share where the model has such. Only the window, the vocabulary and the number of layers are cut. The largest
    # takes 9 GB in bfloat16 and 19 GB in float32; one that does not fit is refused in its row.
    config.configurations = tuple(
        f"random:gemma-{name}?seed=0&layers={layers}&vocab=8192&window=48"
        for name, layers in (
            ("3-270m", 6), ("3-1b", 6), ("3-4b", 6), ("3-12b", 6), ("3-27b", 6),
            ("4-e2b", 10), ("4-e4b", 12), ("4-12b", 6), ("4-31b", 6), ("4-26b-a4b", 6),
        )
    )  # fmt: skip
    config.configuration_shapes = (2, 7, 33, 128)
    config.configuration_tokens = 150
    config.configuration_kv_block = 64
    # batch_invariance: texts of 2 to 500 tokens, some after a prefix that ends inside a K/V block.
    config.batch_rows = (1, 3, 16)
    config.sequences = 200
    config.sequence_tokens = 500
    config.prefix_tokens = 300
    config.new_tokens = 16
    return config
