"""Speed and memory of a model, whole and by part, and with --peers beside transformers on the same weights.

  python -m experiments.bench --config=configs/bench_270m.py --out=DIR [--peers]

The exit code says whether every figure that was measured is as wanted; without --peers those beside transformers are
not, and the report says so.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments import harness
from experiments.bench import measurement, peer
import kvgraft_jax as kg
from kvgraft_jax import paths

_PEERS = flags.DEFINE_bool("peers", False, "measure transformers too, in turns with ours")
_PEERS_PYTHON = flags.DEFINE_string(
    "peers_python", str(peer.DEFAULT_PYTHON), "interpreter with requirements-peers.txt (bash workspace.sh peers)"
)


def run(settings: measurement.Settings, model: kg.Model, out: pathlib.Path) -> harness.Findings:
    """Measures what the settings and the flags ask for."""
    return measurement.run(
        settings, model, out, paths.absolute(_PEERS_PYTHON.value, "--peers_python") if _PEERS.value else None
    )


EXPERIMENT = harness.Experiment(
    "bench",
    "Every figure that was measured is as wanted.",
    measurement.Settings,
    run,
)
