"""Speed and memory of the real Gemma 3 270M, whole and by part, and beside transformers.

  bash workspace.sh peers
  bash workspace.sh bench --config=configs/bench_270m.py --peers --out=out/bench

Without --peers, only our side is measured. `--config.widths=8,16` and the like shorten the curve; `()` leaves it out.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Returns the benchmark's settings."""
    config = ml_collections.ConfigDict()
    config.model = "package:gemma-3-270m"
    config.dtype = "bfloat16"
    config.capacity = 4096  # The engine's default.
    config.shapes = (2, 10, 32, 256)  # The engine's default on CPUs; () means the platform's own.
    config.kv_block = 128  # The engine's default; 0 means that, too.

    # Tokens.
    config.prompt_tokens = 512  # Prefill of a short text, and decode after it.
    config.context_tokens = 2000  # Deposit and graft.
    config.question_tokens = 30
    config.decode_tokens = 32
    config.sequences = 10  # That decode together, each after `sequence_tokens`.
    config.sequence_tokens = 128
    config.step_starts = (0, 512, 1800)

    config.repeats = 5  # Of everything that a claim rests on; the first call comes on top and is reported apart.
    config.memory_tokens = 512
    config.peer_threads = 2

    # Curves: prefill of the prompt and decode at other shapes of the step.
    config.widths = (8, 10, 12, 16, 32, 64, 128, 256)
    config.kv_blocks = (64, 128, 256)
    config.curve_decode_tokens = 8
    config.curve_repeats = 3
    return config
