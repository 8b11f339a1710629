"""Where jax refuses transfers that are not asked for by name; and where it finds no device of the wanted kind."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

_EVERY_CALL = """
import sys
import kvgraft_jax as kg
from tests import no_thread_test, tiny
mesh = kg.make_mesh(int(sys.argv[2]))
model = kg.load_model(tiny.URI, mesh=mesh)
engine = kg.Engine(model, capacity=96, shapes=(8,), rows=2, kv_block=16)
state = engine.extend(engine.prefill(tiny.tokens(40)), [3])
tokens, after = engine.generate(state, max_new_tokens=3, stop_ids=())
engine.score(tiny.tokens(11))
states = engine.extend_many(engine.prefill_many([[1, 2], [3], tiny.tokens(9)]), [[4], [5, 6], [7]])
drawn = engine.generate_many(states, max_new_tokens=3, stop_ids=(), sampling=kg.Sampling(seed=1))
alone = engine.generate(states[2], max_new_tokens=3, stop_ids=(), sampling=kg.Sampling(seed=1))
assert drawn[2][0] == alone[0] and kg.compare(drawn[2][1], alone[1]).equal
artifact = engine.capture(state)
loaded = kg.load_artifact(sys.argv[1], kg.save_artifact(artifact, sys.argv[1]))
again = engine.graft(loaded)
assert kg.compare(state, again).equal and engine.verify(loaded)
assert engine.generate(again, max_new_tokens=3, stop_ids=())[0] == tokens
print("all", engine.pin.id, [tokens for tokens, _ in drawn])
"""


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_every_call_works_where_transfers_must_be_asked_for(tmp_path, num_devices):
    machine = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
    guarded = run(_EVERY_CALL, str(tmp_path), str(num_devices), JAX_TRANSFER_GUARD="disallow", NPROC="8", **machine)
    assert guarded.stdout.startswith("all "), guarded.stderr
    free = run(_EVERY_CALL, str(tmp_path), str(num_devices), NPROC="8", **machine)
    assert free.stdout == guarded.stdout, free.stderr


@pytest.mark.parametrize("call", ["kvgraft_jax.load_model('random:gemma-3-270m?layers=1')", "kvgraft_jax.make_mesh(2)"])
def test_a_device_that_is_not_there_is_an_error_that_says_what_to_do(call):
    done = run(f"import kvgraft_jax\n{call}", JAX_PLATFORMS="nonesuch")
    assert "DeterminismError: jax cannot start on nonesuch" in done.stderr and "set it to cpu" in done.stderr
