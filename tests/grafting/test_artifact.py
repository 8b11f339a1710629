"""The artifact: every bit kept, nobody can change it, impossible states refused, ids cover what they say."""

import copy
import dataclasses
import itertools
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from kvgraft_jax import digest, errors
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import manifest as manifest_lib

BF16 = ml_dtypes.bfloat16
PIN = pin_lib.Pin({"schema": pin_lib.SCHEMA, "kv_block": 16, "model": {"sliding": {"window": 5}}})


def make_stack(kind="sliding", layers=(0, 1, 3), start=6, rows=4, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    return artifact_lib.KVStack(
        kind, layers, start, rng.standard_normal((len(layers), 2, rows, 1, 16), np.float32).astype(dtype)
    )


def make_artifact(**changes):
    """Ten tokens of a four-layer model: three sliding layers with the last four rows, one full layer with all ten."""
    fields = dict(
        policy="visible",
        token_ids=tuple(range(2, 12)),
        stacks=(make_stack(), make_stack("full", (2,), 0, 10, seed=1)),
        logits_V=np.linspace(-3, 3, 48, dtype=np.float32),
        pin=PIN,
        provenance={"verifier": "exact-match", "tries": 2},
    )
    return artifact_lib.Artifact(**fields | changes)


def test_properties():
    artifact = make_artifact()
    assert artifact.length == 10 and artifact.positions == range(10)
    assert artifact.stacks[0].positions == range(6, 10)
    assert artifact.nbytes == 10 * 4 + 48 * 4 + 3 * 2 * 4 * 16 * 2 + 2 * 10 * 16 * 2
    assert artifact.token_ids_S.dtype == np.int32 and artifact.token_ids_S.tolist() == list(artifact.token_ids)
    assert make_artifact(token_ids=np.arange(2, 12)) == artifact
    for text in (artifact.artifact_id, "10, positions 0 to 9", "visible", "verifier", "exact-match"):
        assert text in str(artifact)
    assert artifact.artifact_id in repr(artifact)


def test_ids_follow_from_the_manifest_alone():
    artifact = make_artifact()
    raw = digest.canonical_json(artifact.manifest)
    manifest = manifest_lib.read(raw, artifact.artifact_id)
    assert manifest == artifact.description
    assert manifest.state_digest == artifact.state_digest
    assert digest.canonical_json(manifest.document()) == raw
    assert manifest.stacks[0].kv.digest == digest.array_digest(artifact.stacks[0].kv_Lx2xSxKxH)


def _flipped(array, bit):
    raw = np.array(array).view(np.uint8).reshape(-1)
    raw[bit // 8] ^= 1 << bit % 8
    return raw.view(array.dtype).reshape(array.shape)


def test_every_part_of_the_state_is_in_the_state_digest():
    base = make_artifact()
    sliding, full = base.stacks
    variants = [
        base,
        make_artifact(token_ids=(3, *base.token_ids[1:])),
        make_artifact(logits_V=_flipped(base.logits_V, 0)),
        make_artifact(pin=pin_lib.Pin(PIN.document | {"kv_block": 32})),
        make_artifact(stacks=(sliding,)),
        make_artifact(stacks=(dataclasses.replace(sliding, layers=(0, 1, 4)), full)),
        make_artifact(stacks=(dataclasses.replace(sliding, kv_Lx2xSxKxH=_flipped(sliding.kv_Lx2xSxKxH, 0)), full)),
        make_artifact(stacks=(sliding, dataclasses.replace(full, kv_Lx2xSxKxH=_flipped(full.kv_Lx2xSxKxH, 9)))),
        make_artifact(
            stacks=(sliding, dataclasses.replace(full, kv_Lx2xSxKxH=full.kv_Lx2xSxKxH.reshape(1, 2, 10, 2, 8)))
        ),
        make_artifact(stacks=(make_stack(start=0, rows=10), full)),
        make_artifact(stacks=(make_stack(start=0, rows=10), full), policy="full"),
    ]
    assert len({variant.state_digest for variant in variants}) == len(variants)
    assert len({variant.artifact_id for variant in variants}) == len(variants)


def test_same_bits_under_another_dtype_have_another_digest():
    values = np.zeros((1, 2, 10, 1, 16), np.float32)
    one = make_artifact(stacks=(artifact_lib.KVStack("full", (0,), 0, values),))
    two = make_artifact(stacks=(artifact_lib.KVStack("full", (0,), 0, values.astype(BF16)),))
    assert one.state_digest != two.state_digest


def test_provenance_is_in_the_artifact_id_only():
    one, two = make_artifact(), make_artifact(provenance={"verifier": "exact-match", "tries": 3})
    assert one.state_digest == two.state_digest and one.artifact_id != two.artifact_id and one != two
    ids = {make_artifact(provenance=p).artifact_id for p in ({}, {"a": ""}, {"b": "a"}, {"a": "1"}, {"a": 1})}
    assert len(ids) == 5


def test_order_of_stacks_and_provenance_does_not_matter():
    base = make_artifact()
    other = make_artifact(stacks=base.stacks[::-1], provenance={"tries": 2, "verifier": "exact-match"})
    assert other == base and hash(other) == hash(base) and len({base, other}) == 1


def test_ids_are_the_same_in_another_process():
    code = "from tests.grafting import test_artifact as t; print(t.make_artifact().artifact_id)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == make_artifact().artifact_id


def test_importing_the_artifact_imports_no_jax():
    code = "import sys, kvgraft_jax.grafting.artifact; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- bits


def test_every_finite_bfloat16_pattern_is_kept():
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7FFF) < 0x7F80]
    bits = bits[: len(bits) // 32 * 32].reshape(1, 2, -1, 1, 16)
    stack = artifact_lib.KVStack("full", (0,), 0, bits.view(BF16))
    assert np.array_equal(stack.kv_Lx2xSxKxH.view(np.uint16), bits)


@pytest.mark.parametrize("dtype, bits", [(BF16, np.uint16), (np.float32, np.uint32)])
def test_every_kind_of_nan_and_both_infinities_are_refused_and_located(dtype, bits):
    width = np.iinfo(bits).bits
    infinity, sign = (0x7F80 if width == 16 else 0x7F800000), 1 << (width - 1)
    quiet = 1 << (6 if width == 16 else 22)
    for payload, negative in itertools.product((0, 1, quiet, quiet | 1, 2 * quiet - 1), (0, sign)):
        raw = np.full((3, 2, 4, 1, 16), infinity - 1 | negative, bits)
        raw[1, 1, 2, 0, 5] = infinity | payload | negative
        found = "NaN" if payload else "-infinity" if negative else " infinity"
        with pytest.raises(errors.CaptureError, match=f"{found} in a value of layer 4, position 8"):
            artifact_lib.KVStack("sliding", (0, 4, 7), 6, raw.view(dtype))


@pytest.mark.parametrize("value, found", [(-np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "-infinity")])
def test_logits_that_are_not_finite_are_refused_and_located(value, found):
    logits_V = np.zeros(48, np.float32)
    logits_V[17] = value
    with pytest.raises(errors.CaptureError, match=f"logits_V: {found} at token id 17"):
        make_artifact(logits_V=logits_V)


def test_float32_specials_are_kept():
    specials = [0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0xFF7FFFFF, 0x7F7FFFFF]
    bits = np.array(specials * 4, np.uint32)
    stack = artifact_lib.KVStack("full", (0,), 0, bits.reshape(1, 2, 1, 1, 16).view(np.float32))
    artifact = make_artifact(token_ids=(5,), stacks=(stack,), logits_V=bits.view(np.float32))
    assert np.array_equal(artifact.logits_V.view(np.uint32), bits)
    assert np.array_equal(artifact.stacks[0].kv_Lx2xSxKxH.view(np.uint32).reshape(-1), bits)


# --- nobody can change it


def test_changing_the_sources_afterwards_changes_nothing():
    kv, logits, tokens, layers = np.ones((1, 2, 3, 1, 16), BF16), np.ones(8, np.float32), [1, 2, 3], [0]
    provenance = {"a": 1}
    artifact = make_artifact(
        token_ids=tokens,
        stacks=[artifact_lib.KVStack("full", layers, 0, kv)],
        logits_V=logits,
        provenance=provenance,
    )
    copies = artifact.logits_V.tobytes(), artifact.stacks[0].kv_Lx2xSxKxH.tobytes()
    kv[:], logits[:], tokens[0], layers[0], provenance["a"] = 7, 7, 7, 7, 7
    assert (artifact.logits_V.tobytes(), artifact.stacks[0].kv_Lx2xSxKxH.tobytes()) == copies
    assert artifact.token_ids == (1, 2, 3) and artifact.stacks[0].layers == (0,) and artifact.provenance["a"] == 1


def test_a_read_only_view_of_writeable_memory_is_copied():
    source = np.ones(8, np.float32)
    view = source[:]
    view.setflags(write=False)
    artifact = make_artifact(logits_V=view)
    source[:] = 2
    assert artifact.logits_V.tolist() == [1.0] * 8


def test_immutable_memory_is_not_copied_again():
    artifact = make_artifact()
    again = dataclasses.replace(artifact)
    assert np.shares_memory(again.logits_V, artifact.logits_V)


def test_read_only_arrays_are_copied_for_their_flag_can_be_turned():
    """A read-only array, and a read-only view of a writable one: neither reaches the artifact afterwards."""
    owner, base = np.ones(8, np.float32), np.ones(8, np.float32)
    owner.setflags(write=False)
    view = base[:]
    view.setflags(write=False)
    for source in (owner, view):
        artifact = make_artifact(logits_V=source)
        owner.setflags(write=True)
        owner[...] = base[...] = 7
        assert artifact.logits_V.max() == 1 and not np.shares_memory(artifact.logits_V, source)
        owner[...] = base[...] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        artifact.logits_V.setflags(write=True)


def test_artifacts_can_be_pickled():
    artifact = make_artifact()
    assert (
        pickle.loads(pickle.dumps(artifact)).artifact_id == artifact.artifact_id == copy.deepcopy(artifact).artifact_id
    )


@pytest.mark.parametrize("provenance", [{"a": "\ud83d\ude00"}, {"\ud800": 1}, {"a": "x" * (1 << 21)}])
def test_provenance_that_cannot_be_written_is_refused(provenance):
    with pytest.raises(errors.InputError, match="provenance"):
        make_artifact(provenance=provenance)


def test_a_character_and_its_surrogates_have_no_common_id():
    assert make_artifact(provenance={"a": "\U0001f600"}).artifact_id != make_artifact(provenance={"a": "x"}).artifact_id
    for document in ({"k": "\ud83d\ude00"}, {"\ud83d": 1}, {"k": 10**5000}):
        with pytest.raises(errors.ConfigError):
            pin_lib.Pin(document)


def test_nothing_in_an_artifact_can_be_written():
    artifact = make_artifact()
    for array in (artifact.logits_V, artifact.token_ids_S, artifact.stacks[0].kv_Lx2xSxKxH):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    with pytest.raises(TypeError):
        artifact.provenance["a"] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        artifact.policy = "full"
    artifact.manifest["policy"] = "full"
    assert artifact.manifest["policy"] == "visible"


def test_strided_arrays_are_taken_in_c_order():
    values = np.random.default_rng(0).standard_normal((16, 1, 10, 2, 1), np.float32).astype(BF16)
    stack = artifact_lib.KVStack("full", (0,), 0, values.T)
    assert stack.kv_Lx2xSxKxH.flags.c_contiguous and np.array_equal(stack.kv_Lx2xSxKxH, values.T)


# --- impossible states


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(kind="global"), "kind"),
        (dict(kind=None), "kind"),
        (dict(layers=()), "layers"),
        (dict(layers=(1, 0, 3)), "layers"),
        (dict(layers=(1, 1, 3)), "layers"),
        (dict(layers=(-1, 1, 3)), "layers"),
        (dict(layers=(True, 2, 3)), "layers"),
        (dict(layers=(0, 1)), "shape"),
        (dict(start=-1), "start"),
        (dict(start=1.0), "start"),
        (dict(kv_Lx2xSxKxH=np.zeros((3, 2, 0, 1, 16), BF16)), "shape"),
        (dict(kv_Lx2xSxKxH=np.zeros((3, 3, 4, 1, 16), BF16)), "shape"),
        (dict(kv_Lx2xSxKxH=np.zeros((3, 2, 4, 16), BF16)), "shape"),
        (dict(kv_Lx2xSxKxH=np.zeros((3, 2, 4, 1, 16), np.float16)), "dtype"),
        (dict(kv_Lx2xSxKxH=np.zeros((3, 2, 4, 1, 16), np.float64)), "dtype"),
        (dict(kv_Lx2xSxKxH=np.zeros((3, 2, 4, 1, 16), ">f4")), "dtype"),
        (dict(kv_Lx2xSxKxH=np.full((3, 2, 4, 1, 16), None)), "dtype"),
    ],
)
def test_impossible_stacks_are_refused(changes, message):
    with pytest.raises(errors.CaptureError, match=message):
        dataclasses.replace(make_stack(), **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(policy="windowed"), "policy"),
        (dict(policy="full"), "start"),
        (dict(token_ids=()), "0 token"),
        (dict(stacks=()), "0 stack"),
        (dict(stacks=("stack",)), "stacks"),
        (dict(token_ids=tuple(range(11))), "rows"),
        (dict(token_ids=tuple(range(9))), "rows"),
        (dict(stacks=(make_stack(), make_stack())), "kinds"),
        (dict(stacks=(make_stack(), make_stack("full", (3,), 0, 10))), "layer"),
        (dict(stacks=(make_stack("full", (2,), 6, 4),)), "start"),
        (dict(logits_V=np.zeros(0, np.float32)), "logits_V"),
        (dict(logits_V=np.zeros((2, 4), np.float32)), "logits_V"),
        (dict(logits_V=np.zeros(4, BF16)), "logits_V"),
        (dict(logits_V=np.zeros(4, np.float64)), "logits_V"),
    ],
)
def test_impossible_states_are_refused(changes, message):
    with pytest.raises(errors.CaptureError, match=message):
        make_artifact(**changes)


@pytest.mark.parametrize("bad", [-1, 1 << 31, True, 1.0, "1", None, np.array([3])])
def test_odd_token_ids_are_refused(bad):
    with pytest.raises(errors.InputError, match=r"token_ids\[1\]: got "):
        make_artifact(token_ids=(1, bad))


def test_integers_of_other_types_are_token_ids_too():
    ids = make_artifact(token_ids=tuple(np.arange(10))).token_ids
    assert ids == tuple(range(10)) and {type(token_id) for token_id in ids} == {int}


@pytest.mark.parametrize(
    "bad", [np.ones(10), np.ones((2, 5), int), np.ones(10, bool), None, 5, {1, 2}, np.array(5), "12"]
)
def test_odd_token_lists_are_refused(bad):
    with pytest.raises(errors.InputError, match="token_ids"):
        make_artifact(token_ids=bad)


@pytest.mark.parametrize(
    "bad",
    [{"a": True}, {"a": 1.5}, {"a": None}, {"a": {}}, {"a": ["b"]}, {"a": b"b"}, {"": 1}, {1: 1}, {"a": 1 << 63}, []],
)
def test_odd_provenance_is_refused(bad):
    with pytest.raises(errors.InputError, match="provenance"):
        make_artifact(provenance=bad)


def test_a_pin_is_wanted():
    with pytest.raises(errors.InputError, match="pin"):
        make_artifact(pin=PIN.document)


# --- reading a manifest


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"", "Expecting value"),
        (b'{"a":1,"a":1}', "twice"),
        (b'{"a":{"b":1,"b":2}}', "twice"),
        (b'{ "a":1}', "canonical"),
        (b'{"b":1,"a":1}', "canonical"),
        (b'{"a":1e0}', "canonical"),
        (b'{"a":1}\n', "canonical"),
        (b'{"a":NaN}', "JSON"),
        (b'{"a":"\xff"}', "utf-8"),
        (b'{"a":' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 100_000, "deep"),
        (b"[]", "fields"),
        (b"{}", "fields"),
    ],
)
def test_other_spellings_of_json_are_refused(raw, message):
    with pytest.raises(errors.IntegrityError, match=message) as caught:
        manifest_lib.read(raw, "0" * 64)
    assert caught.value.artifact == "0" * 64 and caught.value.field.startswith("manifest.json")


def test_a_manifest_under_another_id_is_refused():
    artifact = make_artifact()
    with pytest.raises(errors.IntegrityError, match=artifact.artifact_id):
        manifest_lib.read(digest.canonical_json(artifact.manifest), "0" * 64)
