"""What makes a graft exact, on a small model: schedule, capacity, window, company, garbage, immutability."""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import engine as engine_lib
from kvgraft_jax import errors
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import compare, storage
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import step as step_lib
from tests import tiny

W = tiny.WINDOW
LENGTHS = (1, 2, W - 1, W, W + 1, 2 * W + 3)
DTYPES = ("bfloat16", "float32")


def hashes(state, policy="visible") -> compare.StateHashes:
    return compare.hashes(state, policy=policy)


def decoded_hashes(engine, state, steps: int) -> list[str]:
    """SHA-256 of the logits after each of `steps` greedy tokens."""
    found: list[str] = []
    engine.generate(
        state,
        max_new_tokens=steps,
        stop_ids=(),
        on_token=lambda _, logits_V: found.append(compare.logits_sha256(logits_V)),
    )
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_round_trip_equals_fresh(dtype, length):
    engine, token_ids = tiny.engine(dtype), tiny.tokens(length + 1)
    state = engine.prefill(token_ids[:-1])
    grafted = engine.graft(engine.capture(state))
    assert compare.compare(state, grafted).equal
    fresh, tail = engine.prefill(token_ids), engine.extend(grafted, token_ids[-1:])
    assert hashes(fresh) == hashes(tail)


@pytest.mark.parametrize("policy", ["visible", "full"])
def test_round_trip_in_a_new_process(tmp_path, policy):
    """Deposits here, grafts and decodes in another interpreter; every hash must agree."""
    engine = tiny.engine()
    script = (
        "import sys; from tests import test_exactness as t, tiny; from kvgraft_jax.grafting import storage\n"
        "engine = tiny.engine()\n"
        "for artifact_id in sys.argv[2:]:\n"
        "    state = engine.graft(storage.load_artifact(sys.argv[1], artifact_id))\n"
        "    state = engine.extend(state, tiny.tokens(1, seed=1))\n"
        "    print(t.hashes(state).logits_sha256, t.hashes(state).kv_sha256, *t.decoded_hashes(engine, state, 4))\n"
    )
    ids, wanted = [], []
    for length in LENGTHS:
        state = engine.prefill(tiny.tokens(length))
        ids.append(storage.save_artifact(engine.capture(state, policy=policy), tmp_path))
        state = engine.prefill(tiny.tokens(length) + tiny.tokens(1, seed=1))
        own = hashes(state)
        wanted.append(" ".join([own.logits_sha256, own.kv_sha256, *decoded_hashes(engine, state, 4)]))
    root = pathlib.Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *ids], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_cut_gives_one_hash(dtype):
    engine, token_ids = tiny.engine(dtype), tiny.tokens(3 * W)
    wanted = hashes(engine.prefill(token_ids), "full")
    rng = np.random.default_rng(0)
    for _ in range(8):
        cuts = sorted({0, len(token_ids), *rng.integers(1, len(token_ids), rng.integers(1, 9)).tolist()})
        state = engine.prefill(token_ids[: cuts[1]])
        for low, high in zip(cuts[1:], cuts[2:], strict=False):
            state = engine.extend(state, token_ids[low:high])
        assert hashes(state, "full") == wanted, cuts


def test_token_by_token_equals_prefill():
    engine, token_ids = tiny.engine(), tiny.tokens(2 * W)
    state = engine.prefill(token_ids[:1])
    for token_id in token_ids[1:]:
        state = engine.extend(state, [token_id])
    assert hashes(state, "full") == hashes(engine.prefill(token_ids), "full")


def test_decoding_equals_reading_what_was_decoded():
    engine = tiny.engine()
    token_ids, state = engine.generate(engine.prefill(tiny.tokens(20)), max_new_tokens=2 * W, stop_ids=())
    assert hashes(state, "full") == hashes(engine.prefill(tiny.tokens(20) + token_ids), "full")


def test_one_artifact_at_three_capacities():
    token_ids = tiny.tokens(2 * W)
    artifact = tiny.engine(capacity=64).capture(tiny.engine(capacity=64).prefill(token_ids))
    found = set()
    for capacity in (64, 160, 256):
        engine = tiny.engine(capacity=capacity)
        assert hashes(engine.prefill(token_ids)) == hashes(engine.graft(artifact))
        state = engine.extend(engine.graft(artifact), tiny.tokens(3, seed=1))
        found.add((hashes(state), *decoded_hashes(engine, state, 5)))
    assert len(found) == 1


def test_order_and_company_do_not_matter():
    """Cold, warm, between other prompts, grafted or not: one hash."""
    engine, token_ids = tiny.engine(), tiny.tokens(W + 5)
    artifact = engine.capture(engine.prefill(token_ids))
    found = set()
    for seed in range(4):
        other = engine.prefill(tiny.tokens(40, seed=10 + seed))
        found.add(hashes(engine.prefill(token_ids)))
        engine.generate(other, max_new_tokens=3)
        found.add(hashes(engine.graft(artifact)))
    assert len(found) == 1


@pytest.mark.parametrize("policy", ["visible", "full"])
def test_window_is_crossed_after_a_graft(policy):
    engine, token_ids = tiny.engine(), tiny.tokens(W + W // 2)
    fresh = engine.prefill(token_ids)
    grafted = engine.graft(engine.capture(fresh, policy=policy))
    assert decoded_hashes(engine, grafted, 2 * W) == decoded_hashes(engine, fresh, 2 * W)


def test_windowed_artifact_is_refused_where_older_rows_are_needed():
    engine = tiny.engine()
    state = engine.graft(engine.capture(engine.prefill(tiny.tokens(2 * W)), policy="visible"))
    assert state.first_row == W + 1
    for call in (lambda: engine.capture(state, policy="full"), lambda: hashes(state, "full")):
        with pytest.raises(errors.WindowError, match=f"row {W + 1}"):
            call()
    again = engine.graft(engine.capture(engine.extend(state, tiny.tokens(3))))
    assert hashes(again) == hashes(engine.prefill(tiny.tokens(2 * W) + tiny.tokens(3)))
    artifact = engine.capture(state)
    sliding, full = artifact.stacks
    short = dataclasses.replace(sliding, start=sliding.start + 1, kv_Lx2xSxKxH=sliding.kv_Lx2xSxKxH[:, :, 1:])
    with pytest.raises(errors.WindowError, match="sliding layers begin at row"):
        engine.graft(dataclasses.replace(artifact, stacks=(short, full)))


def test_missing_or_extra_layer_is_refused():
    engine = tiny.engine()
    artifact = engine.capture(engine.prefill(tiny.tokens(5)))
    sliding, full = artifact.stacks
    fewer = dataclasses.replace(sliding, layers=sliding.layers[:-1], kv_Lx2xSxKxH=sliding.kv_Lx2xSxKxH[:-1])
    extra = dataclasses.replace(
        full, layers=(5, 7), kv_Lx2xSxKxH=np.concatenate([full.kv_Lx2xSxKxH, full.kv_Lx2xSxKxH])
    )
    for stacks, field in (((fewer, full), "sliding"), ((sliding, extra), "full"), ((sliding,), "full")):
        with pytest.raises(errors.IntegrityError, match=f"{field}: layers"):
            engine.graft(dataclasses.replace(artifact, stacks=stacks))


def dirty(cache: cache_lib.Cache, length: int, seed: int) -> cache_lib.Cache:
    """Returns the cache with random bit patterns, NaN and infinities among them, in every row from `length` on."""
    rng = np.random.default_rng(seed)

    def spoil(array_SxKxH: jax.Array) -> jax.Array:
        rows = np.array(array_SxKxH)
        bits = rng.integers(0, 256, rows[length:].nbytes, dtype=np.uint8).view(rows.dtype)
        rows[length:] = bits.reshape(rows[length:].shape)
        rows[-1] = 0x7FC0 if rows.dtype == np.uint16 else np.nan  # a bfloat16 cache holds bits
        return jnp.array(rows)

    return jax.tree.map(spoil, cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_and_idle_lanes_change_no_bit(dtype, monkeypatch):
    engine, token_ids = tiny.engine(dtype), tiny.tokens(W + 7)
    wanted = hashes(engine.extend(engine.prefill(token_ids[:-3]), token_ids[-3:]), "full")
    rng = np.random.default_rng(1)

    cut = step_lib.cut

    def noisy(token_ids, start, width):
        for read in cut(token_ids, start, width):
            read.tokens_T[read.count :] = rng.integers(-5, 600, width - read.count, dtype=np.int32)
            yield read

    monkeypatch.setattr(step_lib, "cut", noisy)
    for seed in range(3):
        state = engine.prefill(token_ids[:-3])
        state = dataclasses.replace(state, cache=dirty(state.cache, state.length, seed))
        assert hashes(engine.extend(state, token_ids[-3:]), "full") == wanted


def test_a_token_may_land_in_any_lane():
    """Rows and logits of one token computed in each lane of the step are the same bits."""
    engine, token_ids = tiny.engine(), tiny.tokens(tiny.WIDTH + 20)
    found = {
        hashes(engine.extend(engine.prefill(token_ids[:first]), token_ids[first:]), "full")
        for first in range(20, 20 + tiny.WIDTH)
    }
    assert len(found) == 1


def test_score_rows_equal_prefills():
    engine, token_ids = tiny.engine(), tiny.tokens(21)
    logits_TxV = engine.score(token_ids)
    assert logits_TxV.dtype == np.float32 and logits_TxV.shape == (21, 512)
    for length in (1, 7, 8, 9, 21):
        np.testing.assert_array_equal(logits_TxV[length - 1], np.asarray(engine.prefill(token_ids[:length]).logits))


def test_states_and_artifacts_never_change():
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(30))
    artifact = engine.capture(state)
    before, artifact_id = hashes(state, "full"), artifact.artifact_id
    grafted = engine.graft(artifact)
    engine.generate(grafted, max_new_tokens=5, stop_ids=())
    engine.extend(grafted, tiny.tokens(9))
    engine.generate(state, max_new_tokens=5, stop_ids=())
    engine.extend(state, tiny.tokens(9))
    assert hashes(state, "full") == before
    assert hashes(grafted) == hashes(state)
    again = engine.graft(artifact)
    assert engine.capture(again).artifact_id == artifact_id
    with pytest.raises(ValueError):
        artifact.stacks[0].kv_Lx2xSxKxH[0] = 0


def test_full_hit_with_an_empty_tail():
    engine = tiny.engine()
    fresh = engine.prefill(tiny.tokens(30))
    grafted = engine.graft(engine.capture(fresh))
    np.testing.assert_array_equal(np.asarray(grafted.logits), np.asarray(fresh.logits))
    assert engine.generate(grafted, max_new_tokens=6)[0] == engine.generate(fresh, max_new_tokens=6)[0]


@pytest.mark.parametrize("bits, found", [(0x7FC0, "NaN"), (0x7F80, "infinity"), (0xFF80, "-infinity")])
def test_a_valid_row_that_is_not_finite_is_refused_at_capture(bits, found):
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(30))
    layer = state.cache.layers[0]
    damaged = dataclasses.replace(layer, v_SxKxH=layer.v_SxKxH.at[29, 0, 0].set(bits))  # of a bfloat16
    layers = (damaged, *state.cache.layers[1:])
    with pytest.raises(errors.CaptureError, match=f"{found} in a value of layer 0, position 29"):
        engine.capture(dataclasses.replace(state, cache=cache_lib.Cache(layers)))


def test_two_widths_give_two_artifacts_and_a_refusal():
    narrow, wide = tiny.engine(width=8), tiny.engine(width=16)
    artifacts = [engine.capture(engine.prefill(tiny.tokens(30))) for engine in (narrow, wide)]
    assert artifacts[0].artifact_id != artifacts[1].artifact_id
    with pytest.raises(errors.PinMismatch) as caught:
        wide.graft(artifacts[0])
    assert "width" in caught.value.fields


def test_contexts_side_by_side_do_not_touch_each_other():
    """Each of 1, 3 and 7 contexts, advanced in turns, ends as if it had been alone."""
    engine = tiny.engine()
    for company in (1, 3, 7):
        prompts = [tiny.tokens(W + 4, seed=seed) for seed in range(company + 1)]
        states = [engine.prefill(prompt[:W]) for prompt in prompts]
        for position in range(W, W + 4):
            states = [engine.extend(s, [p[position]]) for s, p in zip(states, prompts, strict=True)]
        assert [hashes(state) for state in states] == [hashes(engine.prefill(prompt)) for prompt in prompts]


def test_a_refused_graft_leaves_live_states_alone(tmp_path):
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(30))
    before = hashes(state, "full")
    artifact_id = storage.save_artifact(engine.capture(state), tmp_path)
    with pytest.raises(errors.ArtifactNotFound):
        storage.load_artifact(tmp_path, "0" * 64)
    data = max((tmp_path / artifact_id).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(errors.IntegrityError):
        engine.graft(storage.load_artifact(tmp_path, artifact_id))
    assert hashes(state, "full") == before
    assert hashes(engine.extend(state, [5])) == hashes(engine.prefill([*tiny.tokens(30), 5]))


def test_overflow_after_a_graft_is_refused(monkeypatch):
    engine = tiny.engine()
    grafted = engine.graft(engine.capture(engine.prefill(tiny.tokens(100))))
    monkeypatch.setattr(engine.runner.programs, "step", lambda *_: pytest.fail("a step ran"))
    for call in (lambda: engine.extend(grafted, tiny.tokens(61)), lambda: engine.generate(grafted, max_new_tokens=61)):
        with pytest.raises(errors.CapacityError, match="100 tokens held \\+ 61"):
            call()


def test_an_inexact_graft_is_asked_for_labelled_and_never_deposited():
    donor, engine = tiny.engine(width=16), tiny.engine()
    artifact = donor.capture(donor.prefill(tiny.tokens(30)))
    with pytest.raises(errors.PinMismatch):
        engine.graft(artifact)
    state = engine.graft(artifact, allow_inexact=True)
    assert not state.exact and not engine.extend(state, [5]).exact and "inexact" in repr(state)
    assert "exact          " in str(compare.compare(state, engine.prefill(tiny.tokens(30))))
    assert engine.graft(engine.capture(engine.prefill([1])), allow_inexact=True).exact
    with pytest.raises(errors.CaptureError, match="another machine or program"):
        engine.capture(engine.generate(state, max_new_tokens=1)[1])
    with pytest.raises(errors.PinMismatch) as caught:
        tiny.engine("float32").graft(artifact, allow_inexact=True)
    assert caught.value.fields == ("dtype", "weights")


class TestDetectors:
    """The hashes above would differ if exactness were lost: each of these computes the same thing another way."""

    def test_free_chunking_differs(self):
        token_ids = tiny.tokens(60)
        found = set()
        for width in (16, 64):
            engine = tiny.engine("float32", width=width)
            found.add(hashes(engine.prefill(token_ids), "full"))
        assert len(found) == 2

    def test_vmap_over_requests_differs(self):
        engine = tiny.engine("float32")
        config = engine.step_config
        token_ids = np.array([tiny.tokens(tiny.WIDTH, seed) for seed in range(8)], np.int32)
        runner = engine.runner
        one = jax.eval_shape(lambda: config.make_cache(engine.capacity))
        caches = jax.tree.map(lambda leaf: jnp.zeros((8, *leaf.shape), leaf.dtype), one)
        batched = jax.jit(
            jax.vmap(lambda t, c: runner.programs._step(runner.params, runner.tables, c, t, jnp.int32(0), jnp.int32(8)))
        )
        together = batched(token_ids, caches)
        alone = run_lib.run(runner, jax.tree.map(lambda leaf: leaf[0], caches), token_ids[0].tolist(), 0)
        assert not np.array_equal(np.asarray(together.hidden_TxD[0]), np.asarray(alone.hidden_TxD))

    def test_one_bit_of_one_valid_row_differs(self):
        engine = tiny.engine()
        artifact = engine.capture(engine.prefill(tiny.tokens(30)))
        kv = np.array(artifact.stacks[1].kv_Lx2xSxKxH)
        kv.view(np.uint16)[0, 1, 3, 0, 0] ^= 1 << 9
        changed = dataclasses.replace(artifact.stacks[1], kv_Lx2xSxKxH=kv)
        artifact_b = dataclasses.replace(artifact, stacks=(artifact.stacks[0], changed))
        a, b = (engine.extend(engine.graft(x), tiny.tokens(4)) for x in (artifact, artifact_b))
        assert hashes(a).kv_sha256 != hashes(b).kv_sha256 and hashes(a).logits_sha256 != hashes(b).logits_sha256


def test_artifact_type_is_what_capture_returns():
    engine: engine_lib.Engine = tiny.engine()
    artifact = engine.capture(engine.prefill([5]), provenance={"who": "test", "n": 1})
    assert isinstance(artifact, artifact_lib.Artifact) and artifact.provenance["n"] == 1
