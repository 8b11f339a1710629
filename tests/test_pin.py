"""The pin: one identity per document, every difference named, nothing that a caller can change afterwards."""

import copy
import json
import pickle

import pytest

from kvgraft_jax import digest, errors
from kvgraft_jax import pin as pin_lib

DOCUMENT = {
    "schema": pin_lib.SCHEMA,
    "model": {
        "vocab_size": 256,
        "layer_kinds": ["sliding", "full"],
        "sliding": {"head_dim": 16, "window": 8, "rotary": {"base": 10000.0, "scale": 1.0}},
        "full": {"head_dim": 16, "window": None, "rotary": {"base": 1000000.0, "scale": 8.0}},
        "softcap": None,
        "norm_eps": 1e-6,
    },
    "weights": "ab" * 32,
    "tokenizer": None,
    "chat_template": "cd" * 32,
    "dtype": "bfloat16",
    "kv_block": 128,
    "rotary_rule": "reference",
    "xla_flags": ["--xla_allow_excess_precision=false"],
    "jax": "0.10.2",
    "platform": "cpu",
    "device_kind": "cpu",
    "program": {"step": "00" * 32, "head": "11" * 32, "draw": "33" * 32},
    "self_test": "44" * 32,
}

# One change of each kind that must be seen, with the field that must be named.
CHANGES = (
    (("weights",), "ef" * 32, "weights"),
    (("tokenizer",), "12" * 32, "tokenizer"),
    (("chat_template",), None, "chat_template"),
    (("dtype",), "float32", "dtype"),
    (("model", "sliding", "rotary", "base"), 10000.000000000002, "model.sliding.rotary.base"),
    (("model", "sliding", "window"), 9, "model.sliding.window"),
    (("model", "softcap"), 30.0, "model.softcap"),
    (("model", "layer_kinds"), ["full", "sliding"], "model.layer_kinds"),
    (("kv_block",), 64, "kv_block"),
    (("jax",), "0.10.3", "jax"),
    (("xla_flags",), [], "xla_flags"),
    (("device_kind",), "NVIDIA H200", "device_kind"),
    (("program", "step"), "22" * 32, "program.step"),
    (("program", "draw"), "22" * 32, "program.draw"),
    (("self_test",), "22" * 32, "self_test"),
    (("schema",), "kvgraft/pin/2", "schema"),
)


def _changed(path, value):
    document = copy.deepcopy(DOCUMENT)
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return document


@pytest.mark.parametrize("path, value, field", CHANGES, ids=[change[2] for change in CHANGES])
def test_each_change_changes_the_id_and_is_named(path, value, field):
    ours, theirs = pin_lib.Pin(DOCUMENT), pin_lib.Pin(_changed(path, value))
    assert ours.id != theirs.id and ours != theirs
    differences = pin_lib.diff(ours, theirs)
    assert [difference.field for difference in differences] == [field]
    assert differences[0].theirs == value
    assert isinstance(differences[0], errors.FieldDifference)


def test_id_is_the_digest_of_the_canonical_document():
    assert pin_lib.Pin(DOCUMENT).id == digest.json_digest(DOCUMENT)


def test_equality_and_hash_are_by_content_not_by_order_or_container():
    reordered = dict(reversed(list(DOCUMENT.items())))
    reordered["xla_flags"] = tuple(reordered["xla_flags"])
    ours, theirs = pin_lib.Pin(DOCUMENT), pin_lib.Pin(reordered)
    assert ours == theirs and hash(ours) == hash(theirs) and ours.id == theirs.id
    assert pin_lib.diff(ours, theirs) == ()
    assert len({ours, theirs}) == 1


def test_a_caller_cannot_change_a_pin():
    source = copy.deepcopy(DOCUMENT)
    pin = pin_lib.Pin(source)
    before = pin.id
    source["model"]["sliding"]["window"] = 99
    pin.document["kv_block"] = 1
    pin.document["model"]["vocab_size"] = 1
    pin.fields()["kv_block"] = 1
    assert pin.id == before and pin.document == json.loads(json.dumps(DOCUMENT))
    with pytest.raises(AttributeError):
        pin.canonical = b"{}"


def test_a_pin_survives_its_own_document_copy_and_pickle():
    pin = pin_lib.Pin(DOCUMENT)
    assert pin_lib.Pin(pin.document) == pin
    assert copy.deepcopy(pin) == pin
    assert pickle.loads(pickle.dumps(pin)) == pin


def test_fields_flatten_dictionaries_and_lists_of_dictionaries():
    pin = pin_lib.Pin({"a": {"b": {"c": 1}}, "flags": ["x", "y"], "cpu": [{"n": 1}, {"n": 2}], "none": None, "e": {}})
    assert pin.fields() == {"a.b.c": 1, "flags": ["x", "y"], "cpu[0].n": 1, "cpu[1].n": 2, "none": None, "e": {}}


def test_absent_is_not_none():
    differences = pin_lib.diff(pin_lib.Pin({"a": None, "x": 1}), pin_lib.Pin({"x": 1, "b": 2}))
    assert [(d.field, d.ours, d.theirs) for d in differences] == [
        ("a", None, pin_lib.MISSING),
        ("b", pin_lib.MISSING, 2),
    ]
    assert "absent" in str(differences[0])


# Pairs that a careless concatenation, comparison or flattening would take for one another.
LOOKALIKES = (
    ({"a": ""}, {"": "a"}),
    ({"x": ["a", ""]}, {"x": ["", "a"]}),
    ({"x": 1}, {"x": 1.0}),
    ({"x": 1}, {"x": True}),
    ({"x": 0}, {"x": None}),
    ({"x": 0.0}, {"x": -0.0}),
    ({"x": "1"}, {"x": 1}),
    ({"a.b": 1}, {"a": {"b": 1}}),
    ({"a": [{"b": 1}]}, {"a[0].b": 1}),
    ({"a": {}}, {"a": []}),
    ({"a": {}}, {"a": [{}]}),
    ({"a": [[{}]]}, {"a": [{}]}),
    ({'"a"': 1}, {"a": 1}),
)


@pytest.mark.parametrize("ours, theirs", LOOKALIKES)
def test_lookalikes_differ_and_the_difference_is_named(ours, theirs):
    ours, theirs = pin_lib.Pin(ours), pin_lib.Pin(theirs)
    assert ours.id != theirs.id and ours != theirs
    assert pin_lib.diff(ours, theirs)
    assert errors.PinMismatch("0" * 64, pin_lib.diff(ours, theirs)).fields


@pytest.mark.parametrize(
    "document, field",
    [
        ({"a": {"b": object()}}, "a.b"),
        ({"a": [1, {"b": b"bytes"}]}, r"a\[1\]\.b"),
        ({"a": float("nan")}, "a"),
        ({"a": float("inf")}, "a"),
        ({"a": {1: 2}}, "a"),
        ({"a": {1, 2}}, "a"),
        ({"a": type("Text", (str,), {})("x")}, "a"),
        ([], "document"),
        ({}, "document"),
        (None, "document"),
    ],
)
def test_odd_documents_are_refused_and_named(document, field):
    with pytest.raises(errors.ConfigError, match=field):
        pin_lib.Pin(document)


def test_a_document_that_contains_itself_is_refused():
    document = {"a": {}}
    document["a"]["a"] = document
    with pytest.raises(errors.ConfigError):
        pin_lib.Pin(document)


def test_str_shows_the_id_and_every_field():
    text = str(pin_lib.Pin(DOCUMENT))
    assert pin_lib.Pin(DOCUMENT).id in text
    assert "model.sliding.window" in text and "--xla_allow_excess_precision=false" in text
