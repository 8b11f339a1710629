"""Speed and memory of a model, whole and by part, and with --peers beside transformers on the same weights.

  python -m experiments.bench --config=configs/bench_270m.py --out=DIR [--peers]

With --peers the exit code says whether every ratio is as wanted; without, our side is measured and nothing is judged.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments import harness
from experiments.benchmark import peer, session
import kvgraft_jax as kg

_PEERS = flags.DEFINE_bool("peers", False, "measure transformers too, in turns with ours")
_PEERS_PYTHON = flags.DEFINE_string(
    "peers_python", str(peer.DEFAULT_PYTHON), "interpreter with requirements-peers.txt (bash workspace.sh peers)"
)


def run(settings: session.Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Measures what the settings and the flags ask for."""
    return session.run(settings, model, out, pathlib.Path(_PEERS_PYTHON.value) if _PEERS.value else None)


EXPERIMENT = harness.Experiment(
    "bench",
    "Every ratio measured beside transformers is as wanted.",
    session.Settings,
    run,
)


if __name__ == "__main__":
    harness.main(EXPERIMENT)
