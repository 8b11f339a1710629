"""What makes a graft exact, on a small model: schedule, capacity, window, company, garbage, immutability."""

from __future__ import annotations

import dataclasses
import os
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
from kvgraft_jax.gemma import products
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
    command = [sys.executable, "-c", script, str(tmp_path), *ids]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # It compiles for itself.
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_widths_give_one_hash_one_pin_and_one_artifact(dtype):
    """Read, decoded and grafted by steps of other widths: rows, logits, tokens, pins and artifacts are the same."""
    token_ids = tiny.tokens(3 * W + 5)
    engines = [tiny.engine(dtype, shapes=shapes) for shapes in ((2, 8), (8,), (2,), (3, 66))]
    assert len({engine.pin for engine in engines}) == 1
    artifacts = [engine.capture(engine.prefill(token_ids), policy="full") for engine in engines]
    assert len({artifact.artifact_id for artifact in artifacts}) == 1
    found = set()
    for donor, engine in zip(artifacts, engines[1:] + engines[:1], strict=True):
        grafted = engine.graft(donor)
        state = engine.extend(grafted, tiny.tokens(11, seed=1))
        assert grafted.exact and state.exact
        found.add((hashes(state, "full"), *decoded_hashes(engine, state, 9)))
    assert len(found) == 1


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


def test_one_artifact_at_three_capacities_and_widths():
    token_ids, donor = tiny.tokens(2 * W), tiny.engine(capacity=64, shapes=(8,))
    artifact = donor.capture(donor.prefill(token_ids))
    found = set()
    for capacity, shapes in ((64, (8,)), (160, (2, 8)), (256, (2,))):
        engine = tiny.engine(capacity=capacity, shapes=shapes)
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


def spoilt(array: jax.Array, rng: np.random.Generator, first_slot: int = 0, axis: int = 1) -> jax.Array:
    """Returns the array with random bit patterns, NaN and infinities among them, in the slots from the given one on."""
    rows = np.moveaxis(np.array(array), axis, 0)
    bits = rng.integers(0, 256, rows[first_slot:].nbytes, dtype=np.uint8).view(rows.dtype)
    rows[first_slot:] = bits.reshape(rows[first_slot:].shape)
    rows[-1] = 0x7FC0 if rows.dtype == np.uint16 else np.nan  # A bfloat16 cache holds bits.
    return jnp.array(np.moveaxis(rows, 0, axis))


@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_and_idle_lanes_change_no_bit(dtype, monkeypatch):
    """In the slots of a context that no token has written, in all blocks of others, and in lanes without a token."""
    engine, token_ids = tiny.engine.__wrapped__(dtype), tiny.tokens(W + 7)
    wanted = hashes(engine.extend(engine.prefill(token_ids[:-4]), token_ids[-4:]), "full")
    rng = np.random.default_rng(1)
    lay_out, idle = step_lib.lay_out, []

    def noisy(pieces, table, width, kv_block):
        idle.append(width - sum(len(piece.tokens) for piece in pieces))
        return lay_out(pieces, table, width, kv_block, idle_tokens=rng.integers(-5, 600, idle[-1], dtype=np.int32))

    monkeypatch.setattr(step_lib, "lay_out", lambda *given, idle_tokens, one_width: noisy(*given))
    ((workspace,),) = [engine._contexts._idle[False]]
    for length in (W + 3, W + 4, W + 6):
        state = engine.prefill(token_ids[:length])
        *whole, last = state.blocks
        kinds = tuple(spoilt(kind, rng, length % tiny.KV_BLOCK, 2) for kind in last.kinds)
        state = dataclasses.replace(state, blocks=(*whole, cache_lib.CacheBlock(kinds)))
        workspace.cache = jax.tree.map(lambda array: spoilt(array, rng), workspace.cache)
        workspace._held = [None] * len(workspace._held)  # Nothing that lies there is a block of a context any more.
        assert hashes(engine.extend(state, token_ids[length:]), "full") == wanted
    assert max(idle) >= 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_may_land_in_any_lane(dtype):
    """Rows and logits of one token computed in each lane of the step are the same bits."""
    engine, token_ids = tiny.engine(dtype, shapes=(tiny.WIDTH,)), tiny.tokens(tiny.WIDTH + 20)
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
    first, (sliding, full) = state.blocks[0], state.blocks[1].kinds
    damaged = sliding.at[0, 1, 29 - tiny.KV_BLOCK, 0, 0].set(bits)  # Of a bfloat16.
    blocks = (first, cache_lib.CacheBlock((damaged, full)))
    with pytest.raises(errors.CaptureError, match=f"{found} in a value of layer 0, position 29"):
        engine.capture(dataclasses.replace(state, blocks=blocks))


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
    donor, engine = tiny.engine(kv_block=32), tiny.engine()
    artifact = donor.capture(donor.prefill(tiny.tokens(30)))
    with pytest.raises(errors.PinMismatch) as caught:
        engine.graft(artifact)
    assert "kv_block" in caught.value.fields
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

    def test_plain_sums_and_products_depend_on_the_width(self, monkeypatch):
        """Without the fixed order of `gemma.products`, steps of 16 and of 64 lanes leave other bits."""
        engine, token_ids = tiny.engine("float32"), tiny.tokens(60)

        def last_hidden(programs: step_lib.Programs, width: int) -> bytes:
            runner = dataclasses.replace(engine.runner, programs=programs, shapes=(width,), prepare=None)
            result = run_lib.run(runner, engine.step_config.make_cache(4), token_ids, 0)
            return np.asarray(result.hidden_TxD[result.lane]).tobytes()

        ordered = step_lib.Programs(engine.step_config)
        assert len({last_hidden(ordered, width) for width in (16, 64)}) == 1
        monkeypatch.setattr(products, "row_sum", lambda x: jnp.sum(x, axis=-1))
        monkeypatch.setattr(products, "_MOST_ROWS", {})
        plain = step_lib.Programs(engine.step_config)
        assert len({last_hidden(plain, width) for width in (16, 64)}) == 2

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
