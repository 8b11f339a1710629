"""Exactness at the sizes of Gemma 4 12B and 31B: heads 256 and 512 wide, a sliding window of 1,024, random weights.

What: the experiments of `exactness_270m` on the true shapes in bfloat16. 12B (48 layers) needs one GPU of 80 GB, 31B
(60 layers) one of 140 GB. The weights come from a seed and are made on the device.

Commands (each with a new or empty folder; `--mesh=N` spreads the model over N devices):
  python -m experiments.graft_exactness --config=configs/exactness_gemma4.py:12b --out=out/graft_12b
  python -m experiments.graft_exactness --config=configs/exactness_gemma4.py:31b --out=out/graft_31b
  python -m experiments.schedule_invariance --config=configs/exactness_gemma4.py:12b --out=out/schedules_12b
  python -m experiments.schedule_invariance --config=configs/exactness_gemma4.py:31b --out=out/schedules_31b
The same code on a CPU: six layers, a small vocabulary, short texts that cross a window of 64 and K/V blocks of 64 (each
command is one line):
  python -m experiments.graft_exactness --config=configs/exactness_gemma4.py:12b --out=out/graft_12b_cut
    --config.samples=5 --config.max_tokens=200 --config.spread_tokens=160 --config.shapes=16 --config.kv_block=64
    "--config.model=random:gemma-4-12b?layers=6&vocab=8192&window=64&seed=0"
  python -m experiments.graft_exactness --config=configs/exactness_gemma4.py:31b --out=out/graft_31b_cut
    --config.samples=5 --config.max_tokens=200 --config.spread_tokens=160 --config.shapes=16 --config.kv_block=64
    "--config.model=random:gemma-4-31b?layers=6&vocab=8192&window=64&seed=0"

Expected: samples 50 (of the cut ones 5), each count 50 (5), kl_nats_max 0.0; schedules 12, distinct_hashes 1, five
detectors true. Not measured on a GPU.
"""

import ml_collections

SIZES = ("12b", "31b")


def get_config(size: str = "12b") -> ml_collections.ConfigDict:
    """Returns the configuration of one size, which stands after a colon: `--config=configs/exactness_gemma4.py:31b`."""
    if size not in SIZES:
        raise ValueError(f"size: got {size!r}, wanted one of {', '.join(SIZES)}")
    config = ml_collections.ConfigDict()
    config.model = f"random:gemma-4-{size}?seed=0"
    config.dtype = "bfloat16"
    config.seed = 0
    config.shapes = (128,)
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
