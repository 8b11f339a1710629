"""The thread test: whether XLA's CPU code gives the same bits on another number of threads.

XLA reads the number of its threads once, from the environment variable NPROC, so two child processes run the
self-test of a small random model: two layers of the engine's own widths, step, K/V block and dtype. They run once per
machine, compiled library, flags and program; that they agreed is remembered in the cache directory.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import subprocess
import sys
from typing import Any
import warnings

import flax
import jax

from kvgraft_jax import children, determinism, digest, errors, remembered, self_test
from kvgraft_jax.checkpoints import random as random_lib
from kvgraft_jax.gemma import config as config_lib
from kvgraft_jax.gemma import rotary
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib

THREADS = (1, 3)

_VOCABULARY = 1024
_WIDTHS = (2, 64)
_EXPERTS = 8
_SECONDS = 600


def check(config: step_lib.StepConfig, device: jax.Device) -> None:
    """Makes sure that the bits of an engine's programs do not depend on the number of threads.

    Nothing is done on other platforms than the CPU. A machine that cannot run the children is warned of.

    Args:
      config: of the engine. Its mesh has no part in the test.
      device: that computes.

    Raises:
      DeterminismError: the children computed different bits, or one of them found its own steps inexact.
    """
    if device.platform == "cpu":
        environment = {key: value for key, value in determinism.environment(device).items() if key != "device_kind"}
        _check(dataclasses.replace(config, mesh=None), digest.canonical_json(environment))


@functools.lru_cache(maxsize=64)
def _check(config: step_lib.StepConfig, environment: bytes) -> None:
    """Returns what `check` finds, once per process; what raises is asked again."""
    key = _key(config, environment)
    if remembered.get(key) == _PASSED:
        return
    found: dict[int, str] = {}
    for threads in THREADS:
        done = _run(config, threads)
        if done is None:
            return
        found[threads] = done
    if len(set(found.values())) > 1:
        raise errors.DeterminismError(
            f"{config.model.name}: a small model of its widths gives other bits on {THREADS[0]} thread than on "
            f"{THREADS[1]} (self-tests {' and '.join(value[:16] for value in found.values())}), so nothing here would "
            "be exact; look for unusual flags or another build of jaxlib"
        )
    remembered.put(key, _PASSED)


_PASSED = {"threads": list(THREADS), "equal": True}


def _key(config: step_lib.StepConfig, environment: bytes) -> list[Any]:
    program = digest.json_digest([dataclasses.asdict(config.model), config.dtype, config.kv_block])
    return ["threads", digest.parse_json(environment), step_lib.programs(config).fingerprint, program]


def _run(config: step_lib.StepConfig, threads: int) -> str | None:
    """Runs the self-test of the cut model in a child process; None, with a warning, where no child can run."""
    environment = children.environment(NPROC=str(threads), JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false")
    command = children.command("kvgraft_jax.thread_test")
    cut = pickle.dumps(dataclasses.replace(config, model=_cut(config.model)))
    try:
        done = subprocess.run(command, input=cut, env=environment, capture_output=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return _untested(threads, str(error))
    if done.returncode == _INEXACT:
        raise errors.DeterminismError(f"on {threads} thread(s): {done.stderr.decode(errors='replace').strip()}")
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return _untested(threads, lines[-1] if lines else f"exit status {done.returncode}")
    return done.stdout.decode().strip()


def _untested(threads: int, reason: str) -> None:
    warnings.warn(
        f"the bits of this engine were not compared with those on {threads} thread(s), since the child process did not "
        f"run ({errors.shown(reason)}); free memory or processes, and start again",
        errors.KVGraftWarning,
        stacklevel=2,
    )


def _cut(config: config_lib.GemmaConfig) -> config_lib.GemmaConfig:
    """Cuts the model to one layer per attention kind, without shared keys and values, and few tokens and experts."""
    kinds = tuple(dict.fromkeys(config.layer_kinds))
    small = dataclasses.replace(config, layer_kinds=kinds, num_kv_shared_layers=0, shared_hidden_dim=None)
    experts = config.experts and min(_EXPERTS, config.experts.num_experts)
    return random_lib.cut(small, vocab=min(_VOCABULARY, config.vocab_size), experts=experts)


_INEXACT = 3


def main() -> int:
    """Reads a pickled `StepConfig` from stdin, runs its self-test on random weights, and prints the SHA-256."""
    determinism.configure()
    config: step_lib.StepConfig = pickle.loads(sys.stdin.buffer.read())
    dtype = config.jnp_dtype
    weights = random_lib.initialise(config.model, 0, dtype)
    tables = rotary.make_tables(config.model, config.kv_block, dtype)
    widths = (config.width,) if config.width else _WIDTHS
    runner = run_lib.Runner(step_lib.programs(config), flax.core.unfreeze(weights.params), tables, widths)
    try:
        print([self_test.result(runner, weights.digest, self_test.Sizes(width, 1, 1)) for width in widths])
    except errors.DeterminismError as error:
        print(error, file=sys.stderr)
        return _INEXACT
    return 0


if __name__ == "__main__":
    sys.exit(main())
