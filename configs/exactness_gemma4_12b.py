"""Exactness at the size of Gemma 4 12B: 48 layers, heads 256 and 512 wide, a sliding window of 1,024, random weights.

What: the experiments of `exactness_270m` on the true shapes in bfloat16. Needs one GPU of 80 GB.
The weights come from a seed and are made on the device; the widths are those of the released model.

Commands (each with a new or empty folder; `--mesh=N` spreads the model over N devices):
  python -m experiments.graft_exactness --config=configs/exactness_gemma4_12b.py --out=out/graft_12b
  python -m experiments.schedule_invariance --config=configs/exactness_gemma4_12b.py --out=out/schedules_12b
The same code on a CPU: six layers, a small vocabulary, short texts that cross a window of 64 and K/V blocks of 64:
  python -m experiments.graft_exactness --config=configs/exactness_gemma4_12b.py --out=out/graft_12b_cut
    --config.samples=5 --config.max_tokens=200 --config.spread_tokens=160 --config.width=16 --config.kv_block=64
    "--config.model=random:gemma-4-12b?layers=6&vocab=8192&window=64&seed=0"    (one line)

Expected: samples 50, each count 50, kl_nats_max 0.0; schedules 12, distinct_hashes 1, five detectors true.
Not measured on a GPU.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = "random:gemma-4-12b?seed=0"
    config.dtype = "bfloat16"
    config.seed = 0
    config.width = 128
    config.kv_block = 256
    # graft_exactness: 50 texts, on average 240 tokens long, six of them longer than the window.
    config.capacity = 1536
    config.samples = 50
    config.min_tokens = 32
    config.max_tokens = 1300
    config.spread_tokens = 96
    config.decode_steps = 8
    # schedule_invariance
    config.schedules = 12
    config.text_tokens = 1100
    config.capacities = (1280, 1536)
    config.single_steps = 64
    return config
