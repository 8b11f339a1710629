"""Resident memory of loading and running a model, in a process of its own, above one that only initialised jax.

`python -m experiments.bench.memory URI DTYPE CAPACITY TOKENS` prints one JSON document; without arguments it
measures the process that only initialised jax.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import gc
import json
import pathlib
import subprocess
import sys
import time

import psutil

from kvgraft_jax import errors

_ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Phase:
    """Bytes above the process that only initialised jax: the peak during a phase, and what is resident at its end."""

    peak_bytes: int
    resident_bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Resident memory by phase.

    Attributes:
      base_bytes: resident in a process that only initialised jax.
      weights_bytes: of all parameters in their dtype.
      cache_bytes: of the cache in which the engine computes, and of the context that the prefill leaves.
      load_s: seconds of `load_model`.
      loading: `load_model`.
      engine: `Engine`, and the compilation of its programs in the first step.
      prefill: reading more tokens, one context alive.
    """

    base_bytes: int
    weights_bytes: int
    cache_bytes: int
    load_s: float
    loading: Phase
    engine: Phase
    prefill: Phase

    @property
    def loading_in_weights(self) -> float:
        """Peak while loading, as a multiple of the weights."""
        return self.loading.peak_bytes / self.weights_bytes

    @property
    def running_in_weights(self) -> float:
        """Returns what is resident after a prefill, cache and context taken off, as a multiple of the weights."""
        return (self.prefill.resident_bytes - self.cache_bytes) / self.weights_bytes


def measure(uri: str, dtype: str, capacity: int, num_tokens: int) -> Memory:
    """Runs the two processes, one after the other.

    Args:
      uri, dtype: for `load_model`.
      capacity: of the engine.
      num_tokens: to prefill, at most `capacity`.
    """
    base = _run([])
    found = _run([uri, dtype, str(capacity), str(num_tokens)])
    base_bytes = base["start"]["resident"]

    def phase(name: str) -> Phase:
        return Phase(found[name]["peak"] - base_bytes, found[name]["resident"] - base_bytes)

    return Memory(
        base_bytes,
        found["weights_bytes"],
        found["cache_bytes"],
        found["load_s"],
        loading=phase("loading"),
        engine=phase("engine"),
        prefill=phase("prefill"),
    )


def _run(arguments: Sequence[str]) -> dict:
    command = [sys.executable, "-m", "experiments.bench.memory", *arguments]
    result = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise errors.ConfigError(f"memory: {' '.join(command)} ended with {result.returncode}; its reason is above")
    return json.loads(result.stdout)


class _Meter:
    """Peak and resident bytes of this process since the last look."""

    def __init__(self):
        self._process = psutil.Process()
        self._forget_peak()

    def look(self) -> dict[str, int]:
        """Returns the peak since the last call, and what is resident now."""
        gc.collect()
        resident = self._process.memory_info().rss
        found = {"peak": max(self._peak() or resident, resident), "resident": resident}
        self._forget_peak()
        return found

    def _peak(self) -> int | None:
        """Reads the kernel's high-water mark; None where the system does not keep one."""
        try:
            lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return None
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)

    def _forget_peak(self) -> None:
        try:
            pathlib.Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pass  # Then a later phase's peak is that of all phases so far: never too low.


def _measure_here(uri: str, dtype: str, capacity: int, num_tokens: int) -> dict:
    import kvgraft_jax as kg

    found: dict[str, object] = {}
    meter = _initialised_meter()
    start = time.perf_counter()
    model = kg.load_model(uri, dtype=dtype)
    found["load_s"] = time.perf_counter() - start
    found["loading"] = meter.look()
    engine = kg.Engine(model, capacity=capacity)
    token_ids = [position % model.config.vocab_size for position in range(num_tokens)]
    state = engine.prefill(token_ids[:1])
    state.logits.block_until_ready()
    found["engine"] = meter.look()
    del state
    state = engine.prefill(token_ids)
    state.logits.block_until_ready()
    found["prefill"] = meter.look()

    import jax

    from kvgraft_jax.gemma import cache as cache_lib

    config = engine.step_config
    num_blocks = config.num_blocks(engine.capacity)
    found["cache_bytes"] = cache_lib.device_bytes(config.model, num_blocks, config.kv_block, config.jnp_dtype)
    found["cache_bytes"] += sum(block.nbytes for block in state.blocks)

    found["weights_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return found


def _initialised_meter() -> _Meter:
    from kvgraft_jax import determinism

    determinism.configure()
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.zeros(1))
    return _Meter()


def main(arguments: Sequence[str]) -> None:
    """Measures this process and prints what was found."""
    if arguments:
        uri, dtype, capacity, num_tokens = arguments
        found = _measure_here(uri, dtype, int(capacity), int(num_tokens))
    else:
        found = {"start": _initialised_meter().look()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
