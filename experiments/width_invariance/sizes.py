"""The true widths of other configurations: random weights, few layers, short texts, read in steps of several widths.

Each model is read in a process of its own, so its memory and its programs go before the next one comes, and a process
that the system ends for want of memory takes nothing with it.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import sys

import numpy as np

from experiments import harness
from experiments.width_invariance import readings
import kvgraft_jax as kg

_MODULE = "experiments.width_invariance.sizes"
_ANSWER = "hashes.json"
_RANDOM_PLANS = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """What is read, and how.

    Attributes:
      uri: of the model.
      dtype: of its parameters.
      devices: over which it is spread.
      kv_block: slots per K/V block.
      shapes: widths of steps, rising.
      num_tokens: of the text, whose tokens are drawn at random.
      seed: of text and plans.
    """

    uri: str
    dtype: str
    devices: int
    kv_block: int
    shapes: tuple[int, ...]
    num_tokens: int
    seed: int


def measure(job: Job, scratch: pathlib.Path) -> dict[str, str | int | bool]:
    """Reads a text with a model in steps of each width, and of all of them mixed; returns a row for the results.

    A model that cannot be read here, for want of memory above all, is refused in its row, so what was found of others
    is not lost.

    Args:
      job: what to read.
      scratch: folder for the answer of the process that reads.
    """
    answer = scratch / _ANSWER
    answer.unlink(missing_ok=True)
    code, said = harness.start_module(_MODULE, json.dumps(dataclasses.asdict(job)), str(answer))
    if code:
        reason = said.strip().splitlines()[-1:] if code > 0 else ["the system ended it, as it does for want of memory"]
        found = [f"refused: {reason[0] if reason else 'no message'} (exit code {code})"]
    else:
        found = json.loads(answer.read_text())
    return {
        "configuration": job.uri.partition(":")[2].partition("?")[0],
        "model": job.uri,
        "tokens": job.num_tokens,
        "shapes": " ".join(map(str, job.shapes)),
        "plans": len(found),
        "distinct_hashes": len(set(found)),
        "holds": len(set(found)) == 1 and not found[0].startswith("refused"),
        "sha256": found[0],
    }


def read(job: Job) -> list[str]:
    """Returns the hash that each plan leaves: one plan for each width, then those that mix them.

    Raises:
      ResourceError: there is no memory for the model.
    """
    model = kg.load_model(job.uri, job.dtype, mesh=kg.make_mesh(job.devices))
    config = model.config
    token_ids = tuple(np.random.default_rng(job.seed).integers(0, config.vocab_size, job.num_tokens).tolist())
    plans = [readings.single(width, job.num_tokens) for width in job.shapes]
    plans += [readings.draw(number, job.seed, job.shapes, job.num_tokens) for number in range(_RANDOM_PLANS)]
    checkpoints = readings.place_checkpoints(job.num_tokens, job.kv_block, config.sliding.window)
    runner = readings.make_runner(model, job.kv_block, job.num_tokens)
    return [readings.read(runner, model.digest, plan, token_ids, checkpoints).sha256 for plan in plans]


def main(arguments: Sequence[str]) -> int:
    """Reads in this process as the first argument says, JSON of a `Job`; the second is the file for the hashes."""
    values = json.loads(arguments[0])
    harness.write_text(
        pathlib.Path(arguments[1]), json.dumps(read(Job(**values | {"shapes": tuple(values["shapes"])})))
    )
    return harness.HOLDS


if __name__ == "__main__":
    sys.exit(harness.guard("width_invariance", lambda: main(sys.argv[1:])))
