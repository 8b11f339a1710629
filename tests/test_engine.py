"""The engine's edge: what goes in is checked before any compute, what comes out has the promised types."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import determinism, device_memory, errors
from kvgraft_jax import engine as engine_lib
from kvgraft_jax.checkpoints import load
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary
from kvgraft_jax.runtime import sampling as sampling_lib
from kvgraft_jax.runtime import step as step_lib
from tests import small_checkpoints, tiny


@pytest.fixture
def no_compute(monkeypatch):
    """Fails the test if a step runs."""

    def refuse(*_):
        pytest.fail("a step ran")

    programs = tiny.engine().runner.programs
    monkeypatch.setattr(programs, "step", refuse)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "got none, wanted one or more"),
        ([1, 512], r"token_ids\[1\]: got 512, wanted 0 to 511"),
        ([-1], r"token_ids\[0\]: got -1"),
        ("text", "encode it"),
        ([1.5], r"token_ids\[0\]: got 1\.5 of type float"),
        ([3, True], r"token_ids\[1\]: got True of type bool"),
        (np.array([True, False]), r"token_ids\[0\]: got .*True.* of type bool"),
        (7, "wanted a list of int"),
        ([[1, 2]], r"token_ids\[0\]: got \[1, 2\] of type list"),
    ],
)
def test_bad_tokens_are_refused(token_ids, message, no_compute):
    for call in (tiny.engine().prefill, tiny.engine().score):
        with pytest.raises(errors.InputError, match=message):
            call(token_ids)


def test_numpy_and_jax_tokens_are_integers_too():
    wanted = tiny.engine().prefill([3, 4, 5]).token_ids
    assert tiny.engine().prefill(np.array([3, 4, 5])).token_ids == wanted == (3, 4, 5)


def test_overflow_is_refused_before_compute(no_compute):
    engine = tiny.engine()
    with pytest.raises(errors.CapacityError, match="161 new = 161, but the cache has 160 slots"):
        engine.prefill(tiny.tokens(161))
    with pytest.raises(errors.CapacityError):
        engine.score(tiny.tokens(161))


def test_overflow_after_a_state_is_refused(monkeypatch):
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(158))
    assert len(engine.generate(state, max_new_tokens=2, stop_ids=())[0]) == 2
    monkeypatch.setattr(engine.runner.programs, "step", lambda *_: pytest.fail("a step ran"))
    with pytest.raises(errors.CapacityError, match="158 tokens held \\+ 3 to decode"):
        engine.generate(state, max_new_tokens=3)
    with pytest.raises(errors.CapacityError, match="158 tokens held \\+ 3 new"):
        engine.extend(state, [1, 2, 3])


def test_an_artifact_longer_than_the_cache_is_refused():
    artifact = tiny.engine().capture(tiny.engine().prefill(tiny.tokens(100)))
    with pytest.raises(errors.CapacityError, match="100 of the artifact"):
        tiny.engine(capacity=64).graft(artifact)


def test_another_position_is_refused():
    artifact = tiny.engine().capture(tiny.engine().prefill(tiny.tokens(10)))
    with pytest.raises(errors.InputError, match="position: got 8, wanted 0"):
        tiny.engine().graft(artifact, position=8)
    for changes, told in (
        ({"position": False}, "position: got False"),
        ({"allow_inexact": "no"}, "got 'no', wanted True"),
    ):
        with pytest.raises(errors.InputError, match=told):
            tiny.engine().graft(artifact, **changes)


def test_the_last_slot_can_be_used():
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(160))
    piecewise = engine.extend(engine.prefill(tiny.tokens(160)[:155]), tiny.tokens(160)[155:])
    np.testing.assert_array_equal(np.asarray(state.logits), np.asarray(piecewise.logits))


@pytest.mark.parametrize("uri", [tiny.URI, small_checkpoints.SMALL_URIS["gemma-4-e2b"]])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch, uri, dtype):
    def make():
        return engine_lib.Engine(tiny.model(dtype, uri), capacity=100, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK)

    engine = make()
    arrays = engine.step_config.make_cache(112 // tiny.KV_BLOCK), engine.runner.tables
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
    monkeypatch.setattr(device_memory, "available", lambda _: needed)
    make()
    monkeypatch.setattr(device_memory, "available", lambda _: needed - 1)
    monkeypatch.setattr(rotary, "make_tables", lambda *_: pytest.fail("tables were made"))
    with pytest.raises(errors.ResourceError, match=f"needs {needed} bytes .* for a cache of 112 tokens") as caught:
        make()
    assert f"has {needed - 1} free" in str(caught.value) and "use a smaller capacity" in str(caught.value)


def test_the_largest_capacity_is_refused_at_once():
    model = load.load_model("random:gemma-3-27b?embed=16&hidden=16&vocab=64&heads=16")
    with pytest.raises(errors.ResourceError, match="needs 2[0-9]{12} bytes"):
        engine_lib.Engine(model, capacity=1 << 22)


def test_capacity_is_rounded_up_to_blocks():
    assert tiny.engine(capacity=150).capacity == 160
    assert tiny.engine(capacity=150).prefill(tiny.tokens(160)).length == 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity: got 0"),
        ({"capacity": 1 << 30}, "capacity: got"),
        ({"width": 1}, "width: got 1, wanted an int, 2 to 16384"),
        ({"capacity": "8"}, "capacity: got '8' of type str"),
        ({"width": 8.0}, "width: got 8.0, wanted an int"),
        ({"width": True}, "width: got True, wanted an int"),
        ({"width": 1 << 20}, "width: got 1048576, wanted an int, 2 to 16384"),
        ({"width": 8, "shapes": (8,)}, r"width, shapes: got 8 and \(8,\), wanted one of the two; width=N is"),
        ({"width": 0, "shapes": ()}, r"width, shapes: got 0 and \(\), wanted one of the two"),
        ({"shapes": ()}, r"shapes: got \(\), wanted widths in rising order, each 2 to 16384"),
        ({"shapes": (32, 2)}, r"shapes: got \(32, 2\), wanted widths in rising order"),
        ({"shapes": (2, 2, 32)}, r"shapes: got \(2, 2, 32\), wanted widths in rising order"),
        ({"shapes": (1, 32)}, r"shapes: got \(1, 32\), wanted .* each 2 to 16384"),
        ({"shapes": (2, 16385)}, r"shapes: got \(2, 16385\), wanted .* each 2 to 16384"),
        ({"shapes": (-(10**5000), 2)}, "shapes: got "),
        ({"shapes": (2, 8.0)}, r"shapes: got \(2, 8\.0\), wanted widths"),
        ({"shapes": (2, True)}, r"shapes: got \(2, True\), wanted widths"),
        ({"shapes": 8}, "shapes: got 8, wanted widths"),
        ({"shapes": "28"}, "shapes: got '28', wanted widths"),
        ({"rows": 0}, "rows: got 0, wanted 1 to 16384"),
        ({"rows": -(10**5000)}, "rows: got "),
        ({"rows": 16385}, "rows: got 16385, wanted 1 to 16384"),
        ({"rows": 4.0}, "rows: got 4.0 of type float, wanted an int"),
        ({"rows": None}, "rows: got None of type NoneType, wanted an int"),
        ({"kv_block": 24}, "kv_block: got 24"),
        ({"kv_block": 0}, "kv_block: got 0"),
        ({"kv_block": 16_000_000}, "kv_block: got 16000000, wanted a multiple of 16, at most 16384"),
        ({"capacity": 10**5000}, "capacity: got"),
        ({"kv_block": 10**5000}, "kv_block: got"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(errors.ConfigError, match=message):
        engine_lib.Engine(tiny.model(), **arguments)


def test_a_width_is_another_way_to_write_one_shape_and_the_shapes_may_be_a_list():
    sizes = {"capacity": tiny.CAPACITY, "kv_block": tiny.KV_BLOCK}
    narrow = engine_lib.Engine(tiny.model(), width=tiny.WIDTH, **sizes)
    assert narrow.shapes == (tiny.WIDTH,) and narrow.step_config == tiny.engine().step_config
    assert engine_lib.Engine(tiny.model(), shapes=[2, 8], **sizes).shapes == (2, 8)
    assert engine_lib.Engine(tiny.model(), **sizes).shapes == engine_lib.DEFAULT_SHAPES["cpu"]


def test_a_state_of_other_weights_is_refused():
    other = engine_lib.Engine(
        tiny.model(uri=tiny.URI.replace("seed=0", "seed=1")), capacity=tiny.CAPACITY, kv_block=tiny.KV_BLOCK
    )
    with pytest.raises(errors.InputError, match="state: its weights"):
        other.extend(tiny.engine().prefill([1, 2]), [3])


def test_only_an_artifact_can_be_grafted():
    with pytest.raises(errors.InputError, match="artifact: got a str, wanted an Artifact"):
        tiny.engine().graft("an id")


def test_a_backend_out_of_configuration_is_noticed(monkeypatch):
    def refuse():
        raise errors.DeterminismError("not in force")

    monkeypatch.setattr(determinism, "assert_in_force", refuse)
    with pytest.raises(errors.DeterminismError):
        engine_lib.Engine(tiny.model(), capacity=64)


def test_a_state_of_another_engine_is_refused():
    state = tiny.engine().prefill([1, 2])
    for engine in (tiny.engine(kv_block=32), tiny.engine("float32")):
        calls = (
            engine.generate,
            engine.capture,
            lambda s, e=engine: e.extend(s, [1]),
            lambda s, e=engine: e.extend_many([s], [[1]]),
            lambda s, e=engine: e.generate_many([s]),
        )
        for call in calls:
            with pytest.raises(errors.InputError, match=r"its step_config\.\w+ is .* of one model and K/V block"):
                call(state)


def test_generate_stops_before_a_stop_token():
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(12))
    token_ids, _ = engine.generate(state, max_new_tokens=6, stop_ids=())
    stop = token_ids[3]
    stopped, end = engine.generate(state, max_new_tokens=6, stop_ids=[stop])
    assert stopped == token_ids[: token_ids.index(stop)]
    assert end.token_ids == state.token_ids + tuple(stopped)
    assert int(np.argmax(np.asarray(end.logits))) == stop
    with pytest.raises(errors.InputError, match="max_new_tokens"):
        engine.generate(state, max_new_tokens=-1)


def test_stop_tokens_of_the_model_are_the_default():
    model = tiny.model()
    state = tiny.engine().prefill(tiny.tokens(12))
    first = tiny.engine().generate(state, max_new_tokens=1, stop_ids=())[0][0]
    config = dataclasses.replace(model.config, stop_ids=(first,))
    engine = engine_lib.Engine(
        dataclasses.replace(model, config=config), capacity=64, width=tiny.WIDTH, kv_block=tiny.KV_BLOCK
    )
    assert engine.generate(engine.prefill(tiny.tokens(12)), max_new_tokens=4)[0] == []


def test_no_new_tokens_are_no_step_and_the_same_context(monkeypatch):
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(20))
    monkeypatch.setattr(engine.runner.programs, "step", lambda *_: pytest.fail("a step ran"))
    results = [
        engine.generate(state, max_new_tokens=0),
        engine.generate(state, max_new_tokens=0, stop_ids=()),
        *engine.generate_many([state, state], max_new_tokens=0),
    ]
    for token_ids, after in results:
        assert token_ids == [] and after.token_ids == state.token_ids
        assert all(ours is theirs for ours, theirs in zip(after.blocks, state.blocks, strict=True))
        np.testing.assert_array_equal(np.asarray(after.logits), np.asarray(state.logits))


def test_types_of_a_state():
    state = tiny.engine().prefill([1, 2, 3])
    assert state.length == 3 and state.logits.shape == (512,) and state.logits.dtype == np.float32
    (block,) = state.blocks
    assert [kind.shape for kind in block.kinds] == [(6, 2, tiny.KV_BLOCK, 2, 32), (1, 2, tiny.KV_BLOCK, 2, 32)]
    assert block.nbytes == 2 * sum(kind.size for kind in block.kinds)
    assert len(tiny.engine().prefill(tiny.tokens(17)).blocks) == 2
    assert repr(state) == "State(3 tokens, gemma-3-270m, bfloat16)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.token_ids = ()


def test_only_blocks_that_do_not_lie_in_the_workspace_are_copied(monkeypatch):
    copied, put_block = [], cache_lib.put_block
    monkeypatch.setattr(
        cache_lib, "put_block", lambda cache, block, *rest: copied.append(block) or put_block(cache, block, *rest)
    )
    engine = tiny.engine()
    state = engine.prefill(tiny.tokens(40))
    engine.generate(state, max_new_tokens=10, stop_ids=())  # Goes on where the last block, which is half full, lies.
    assert not copied
    engine.extend(state, tiny.tokens(40))
    assert copied == [state.blocks[2]]
    again = tiny.engine.__wrapped__()  # Its workspace is empty.
    again.extend(state, [5])
    assert copied[1:] == list(state.blocks)
    again.extend(state, [6])
    assert copied[4:] == [state.blocks[2]]


def test_a_step_needs_no_more_memory_in_a_larger_cache():
    def temporary_bytes(capacity: int) -> int:
        engine = tiny.engine(capacity=capacity)
        runner, config, num_blocks = engine.runner, engine.step_config, capacity // tiny.KV_BLOCK
        piece = step_lib.Piece(0, 0, (3, 4, 5))
        lanes = step_lib.lay_out([piece], [range(num_blocks)], tiny.WIDTH, tiny.KV_BLOCK)
        arguments = runner.params, runner.tables, config.make_cache(num_blocks), lanes
        return (
            jax.jit(runner.programs.step, donate_argnums=2)
            .lower(*arguments)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert 0 < temporary_bytes(64) == temporary_bytes(4096)


def test_stop_tokens_that_are_none(monkeypatch):
    state = tiny.engine().prefill([3, 4])
    monkeypatch.setattr(tiny.engine().runner.programs, "step", lambda *_: pytest.fail("a step ran"))
    with pytest.raises(errors.InputError, match=r"^stop_ids\[1\]: got -1, wanted 0 to "):
        tiny.engine().generate(state, stop_ids=[1, -1])
    for stop_ids in (0, False, ["a"], [[1]], [10**5000]):
        with pytest.raises(errors.InputError):
            tiny.engine().generate(state, stop_ids=stop_ids)
    with pytest.raises(errors.InputError, match="max_new_tokens: got an? "):
        tiny.engine().generate(state, max_new_tokens=-(10**5000))
    with pytest.raises(errors.InputError, match=r"token_ids\[0\]: got an? "):
        tiny.engine().prefill([10**5000])


def test_decoding_takes_the_lowest_id_of_the_largest_logit_that_is_not_suppressed():
    logits_V = jnp.asarray([1.0, 3.0, 3.0, 2.0, 3.0])
    assert [sampling_lib.argmax(logits_V, ids) for ids in ((), (1,), (1, 2), (1, 2, 4))] == [1, 2, 4, 3]
    assert logits_V.tolist() == [1.0, 3.0, 3.0, 2.0, 3.0]


def test_an_engine_and_a_model_show_themselves_in_one_line():
    engine = tiny.engine()
    assert repr(engine) == f"Engine(gemma-3-270m, bfloat16, capacity={tiny.CAPACITY}, shapes=(2, 8), kv_block=16)"
    assert repr(engine.model).startswith("Model(random:gemma-3-270m?") and len(repr(engine.model)) < 250


def test_rows_without_a_piece_in_the_tokenizer_are_never_chosen():
    model = tiny.model()
    state = tiny.engine().prefill(tiny.tokens(12))
    best = int(np.argmax(np.asarray(state.logits)))
    tokenizer = types.SimpleNamespace(vocab_size=best, digest="0" * 64)
    model = dataclasses.replace(model, tokenizer=tokenizer)
    engine = engine_lib.Engine(model, capacity=tiny.CAPACITY, shapes=tiny.SHAPES, kv_block=tiny.KV_BLOCK)
    begun = engine.prefill(tiny.tokens(12))
    np.testing.assert_array_equal(np.asarray(begun.logits), np.asarray(state.logits))
    token_ids, _ = engine.generate(begun, max_new_tokens=8, stop_ids=())
    assert token_ids[0] == int(np.argmax(np.asarray(state.logits)[:best])) and max(token_ids) < best


def test_an_engine_does_not_change():
    engine = tiny.engine()
    for name in ("capacity", "model", "runner", "another"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(engine, name, 1)
    before = dict(vars(engine))
    engine.prefill([1, 2])
    assert {name: value for name, value in vars(engine).items() if name in before} == before


def test_a_capacity_beyond_the_positions_of_training_is_warned_of_once():
    model = tiny.model()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, name="short", max_positions=64))
    sizes = {"width": tiny.WIDTH, "kv_block": tiny.KV_BLOCK}
    engine_lib.Engine(model, capacity=64, **sizes)
    with pytest.warns(errors.KVGraftWarning, match="got 65 tokens, but short was trained on 64 positions"):
        engine_lib.Engine(model, capacity=65, **sizes)
    engine_lib.Engine(model, capacity=65, **sizes)
