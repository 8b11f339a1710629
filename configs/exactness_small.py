"""Exactness on a small random model: five sliding layers and a full one, a window of 32, K/V blocks of 32 slots.

What: the same experiments as `exactness_270m`, for a first look and for the tests. The model is wide enough that
other programs round differently, so the detectors have something to find.

Commands (each with a new or empty folder; --config.dtype=float32 passes too):
  python -m experiments.graft_exactness --config=configs/exactness_small.py --out=out/graft_small
  python -m experiments.schedule_invariance --config=configs/exactness_small.py --out=out/schedules_small
  python -m experiments.width_invariance --config=configs/exactness_small.py --out=out/widths_small
  python -m experiments.batch_invariance --config=configs/exactness_small.py --out=out/batches_small

Expected: samples 50, each count 50, kl_nats_max 0.0; schedules 40, distinct_hashes 1, five detectors true; of the
widths, plans 26, distinct_hashes 1, configurations_equal 2, both detectors true; sequences 200, equal 200,
four detectors true.
Time, measured on two idle cores, compilation and the second process included: graft_exactness 18 s in bfloat16 and 22 s
in float32, schedule_invariance 14 s in bfloat16 and 15 s in float32.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = (
        "random:gemma-3-270m?seed=0&layers=6&vocab=512&embed=640&hidden=512&heads=4&kv_heads=1&head_dim=64&window=32"
    )
    config.dtype = "bfloat16"
    config.seed = 0
    config.shapes = (2, 10)
    config.kv_block = 32
    # graft_exactness
    config.capacity = 256
    config.samples = 50
    config.min_tokens = 2
    config.max_tokens = 200
    config.spread_tokens = 200
    config.decode_steps = 16
    # schedule_invariance
    config.schedules = 40
    config.text_tokens = 150
    config.capacities = (160, 192, 256)
    config.single_steps = 64
    # width_invariance: each width alone reads the whole text, which crosses the window and K/V blocks several times.
    config.width_shapes = (2, 3, 7, 16, 33, 64)
    config.width_plans = 20
    config.width_tokens = 150
    # Two small models for the parts that the model above lacks: experts; shared layers and per-layer embeddings.
    config.configurations = (
        "random:gemma-4-26b-a4b?seed=0&layers=6&vocab=512&embed=256&hidden=384&heads=4&kv_heads=2&head_dim=64"
        "&experts=8&window=32",
        "random:gemma-4-e2b?seed=0&layers=10&vocab=512&embed=256&hidden=768&heads=4&head_dim=64&per_layer=32&window=32",
    )
    config.configuration_shapes = (2, 7, 33)
    config.configuration_tokens = 80
    config.configuration_kv_block = 32
    # batch_invariance: texts of 2 to 60 tokens, some after a prefix that crosses the window and ends inside a block.
    config.batch_rows = (1, 3, 16)
    config.sequences = 200
    config.sequence_tokens = 60
    config.prefix_tokens = 45
    config.new_tokens = 5
    return config
