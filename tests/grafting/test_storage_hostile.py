"""Hostile entries, made by someone who seals what was changed: refused before allocation, with the field named."""

import json
import os

import numpy as np
import pytest

from kvgraft_jax import digest, errors
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.grafting import container, orbax_arrays, storage
from kvgraft_jax.grafting import manifest as manifest_lib
from tests import entries

stored, entry = entries.stored, entries.entry


def test_a_flipped_bit_under_a_new_seal_names_array_and_leaf(tmp_path):
    artifact = entries.make_artifact(vocabulary=600_000)
    entry = tmp_path / storage.save_artifact(artifact, tmp_path)
    path = entry / "arrays" / "state" / "logits" / "0"
    raw = bytearray(path.read_bytes())
    raw[digest.LEAF_BYTES + 5] ^= 1
    path.write_bytes(raw)
    entries.reseal(entry)
    entries.assert_refused(entry, "logits: leaf 1 of 3")


@pytest.mark.parametrize("name", ["token_ids", "logits", "sliding", "full"])
def test_a_flipped_bit_under_a_new_seal_in_each_array(name, entry):
    path = next(p for p in entries.files_of(entry / "arrays" / "state" / name) if p.name != ".zarray")
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)
    entries.reseal(entry)
    entries.assert_refused(entry, f"{name}: leaf 0 of 1")


@pytest.mark.parametrize("value, found", [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "-infinity")])
def test_nan_and_infinities_under_a_fitting_manifest_are_refused(entry, value, found):
    path = entry / "arrays" / "state" / "logits" / "0"
    logits_V = np.frombuffer(path.read_bytes(), np.float32).copy()
    logits_V[3] = value
    path.write_bytes(logits_V.tobytes())
    leaves = digest.leaf_digests(logits_V)
    entries.assert_refused(
        forge(entry, lambda manifest: manifest["logits"].update(leaves=leaves)), f"logits_V: {found} at token id 3"
    )


def rewrite(path, change):
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(digest.canonical_json(document))


def forge(entry, change):
    """Changes the manifest, gives the entry the id that the new manifest has, and seals it again."""
    rewrite(entry / "manifest.json", change)
    document = json.loads((entry / "manifest.json").read_bytes())

    def array(value):
        return manifest_lib.ArrayEntry(value["dtype"], value["shape"], value["leaves"])

    manifest = manifest_lib.Manifest(
        document["policy"],
        array(document["token_ids"]),
        tuple(manifest_lib.StackEntry(s["kind"], s["layers"], s["start"], array(s["kv"])) for s in document["stacks"]),
        array(document["logits"]),
        pin_lib.Pin(document["pin"]),
        document["provenance"],
    )
    forged = entry.parent / manifest.artifact_id
    os.rename(entry, forged)
    entries.reseal(forged)
    return forged


def test_forge_alone_is_not_refused(entry):
    forged = forge(entry, lambda manifest: manifest["provenance"].update(note="hello"))
    assert storage.load_artifact(forged.parent, forged.name).provenance["note"] == "hello"


def change_at(*path, value):
    def change(document):
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


LEAF = "0" * 64
FORGERIES = {
    "one more head": (("stacks", 0, "kv", "shape"), [2, 2, 2, 2, 4], "sliding"),
    "one row less": (("stacks", 1, "kv", "shape"), [1, 2, 4, 1, 8], "rows"),
    "other axes": (("stacks", 0, "kv", "shape"), [2, 2, 2, 4, 1], "sliding"),
    "four axes": (("stacks", 0, "kv", "shape"), [2, 2, 2, 4], "shape"),
    "no layer axis": (("stacks", 0, "kv", "shape"), [3, 2, 2, 1, 4], "shape"),
    "10 TB": (("logits", "shape"), [10 * 1024**4 // 4], "logits"),
    "10 TB, other leaves": (
        ("logits",),
        {"dtype": "float32", "shape": [2_500_000_000_000], "leaves": [LEAF]},
        "logits",
    ),
    "1 GB, as many leaves": (("logits",), {"dtype": "float32", "shape": [1 << 28], "leaves": [LEAF] * 1024}, "logits"),
    "more than 64 bits": (("logits", "shape"), [10**30], "logits.shape"),
    "negative": (("logits", "shape"), [-12], "logits.shape"),
    "two negatives": (("stacks", 0, "kv", "shape"), [2, 2, 2, -1, -4], "shape"),
    "zero": (("logits", "shape"), [0], "logits.shape"),
    "fraction": (("logits", "shape"), [12.0], "logits.shape"),
    "truth": (("logits", "shape"), [True], "logits.shape"),
    "no axis": (("logits", "shape"), [], "logits"),
    "two axes": (("logits", "shape"), [3, 4], "logits.shape"),
    "object": (("logits", "dtype"), "object", "logits.dtype"),
    "pickle": (("logits", "dtype"), "|O", "logits.dtype"),
    "other width": (("stacks", 0, "kv", "dtype"), "float16", "dtype"),
    "bf16 as f32": (("stacks", 0, "kv", "dtype"), "float32", "sliding"),
    "tokens as f32": (("token_ids", "dtype"), "float32", "token_ids.dtype"),
    "short leaf": (("logits", "leaves"), ["00"], "logits.leaves"),
    "no leaf": (("logits", "leaves"), [], "logits.leaves"),
    "leaf of another kind": (("logits", "leaves"), [7], "logits.leaves"),
    "layers twice": (("stacks", 0, "layers"), [0, 1], "layer"),
    "layers falling": (("stacks", 0, "layers"), [2, 0], "layers"),
    "layer too many": (("stacks", 0, "layers"), [0, 2, 3], "shape"),
    "start": (("stacks", 0, "start"), 2, "rows"),
    "start negative": (("stacks", 0, "start"), -3, "start"),
    "kind": (("stacks", 0, "kind"), "../../x", "kind"),
    "kind twice": (("stacks", 0, "kind"), "full", "full"),
    "policy": (("policy",), "none", "policy"),
    "nested provenance": (("provenance", "x"), {"y": 1}, "provenance"),
    "true provenance": (("provenance", "x"), True, "provenance"),
}


@pytest.mark.parametrize("path, value, field", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_manifest_with_its_own_id_is_refused_before_arrays_are_read(path, value, field, entry, monkeypatch):
    reads = []
    read = orbax_arrays.read
    monkeypatch.setattr(orbax_arrays, "read", lambda *a: reads.append(a) or read(*a))
    known = value != "object" and value != "|O" and value != "float16"
    if known:
        entry = forge(entry, change_at(*path, value=value))
    else:  # A dtype without a known width has no id of its own.
        rewrite(entry / "manifest.json", change_at(*path, value=value))
        entries.reseal(entry)
    entries.assert_refused(entry, field)
    assert not reads


FORMS = {
    "unknown field": (lambda m: m.update(extra=1), "document"),
    "missing field": (lambda m: m.pop("pin"), "document"),
    "other schema": (lambda m: m.update(schema="kvgraft/artifact/2"), "schema"),
    "pin of another form": (lambda m: m.update(pin=[]), "pin"),
    "stacks of another form": (lambda m: m.update(stacks={}), "stacks"),
    "no stack": (lambda m: m.update(stacks=[]), "stack"),
    "unknown stack field": (lambda m: m["stacks"][0].update(extra=1), "stacks[0]"),
    "missing array field": (lambda m: m["stacks"][0]["kv"].pop("leaves"), "stacks[0].kv"),
    "no list of layers": (lambda m: m["stacks"][0].update(layers=None), "stacks[0].layers"),
    "no logits": (lambda m: m.update(logits=None), "logits"),
    "no provenance": (lambda m: m.update(provenance=None), "provenance"),
    "other provenance": (lambda m: m["provenance"].update(tries=9), "describes artifact"),
}


@pytest.mark.parametrize("change, field", FORMS.values(), ids=FORMS)
def test_a_manifest_of_another_form_is_refused(change, field, entry):
    rewrite(entry / "manifest.json", change)
    entries.reseal(entry)
    entries.assert_refused(entry, field)


@pytest.mark.parametrize("name", [container.SEAL, "manifest.json"])
def test_a_key_that_stands_twice_is_refused(name, entry):
    path = entry / name
    key = b'"schema":"kvgraft/'
    path.write_bytes(path.read_bytes().replace(key, b'"schema":"x",' + key, 1))
    if name != container.SEAL:
        entries.reseal(entry)
    entries.assert_refused(entry, "twice")


def test_what_orbax_notes_is_read_as_strictly(entry):
    path = entry / "arrays" / "state" / "logits" / ".zarray"
    raw = path.read_bytes()
    for bad, reason in (
        (raw.replace(b"{", b'{"order": "C", ', 1), "twice"),
        (raw + b" " * (1 << 16), "larger than"),
        (b"[" * 50_000, "nested"),
    ):
        path.write_bytes(bad)
        entries.reseal(entry)
        entries.assert_refused(entry, reason)


def test_huge_json_files_are_refused_unread(entry):
    os.truncate(entry / container.SEAL, 1 << 40)
    entries.assert_refused(entry, "at most")
    entry_seal = entry / container.SEAL
    entry_seal.write_bytes(b" " * ((1 << 20) + 1))
    entries.assert_refused(entry, "at most")


@pytest.mark.parametrize(
    "field, value",
    [("shape", [13]), ("chunks", [6]), ("dtype", "<f8"), ("dtype", "bfloat16"), ("dtype", ">f4"), ("order", "F"),
     ("compressor", {"id": "zstd", "level": 1}), ("filters", [{"id": "pickle"}])],
)  # fmt: skip
def test_other_layouts_are_refused_before_arrays_are_read(field, value, entry):
    rewrite(entry / "arrays" / "state" / "logits" / ".zarray", lambda noted: noted.update({field: value}))
    entries.reseal(entry)
    entries.assert_refused(entry, f"logits: stored with {field}")


def test_a_shape_that_orbax_notes_too_is_compared_with_the_bytes_on_disk(entry, monkeypatch):
    reads = []
    monkeypatch.setattr(orbax_arrays, "read", lambda *arguments: reads.append(arguments))
    shape = [25 * 10**4]
    rewrite(entry / "arrays" / "state" / "logits" / ".zarray", lambda noted: noted.update(shape=shape, chunks=shape))
    entry = forge(entry, lambda manifest: manifest["logits"].update(shape=shape))
    entries.assert_refused(entry, "logits: 48 bytes on disk, wanted 1000000")
    assert not reads


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b"{" * 1000])
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/logits/.zarray"])
def test_broken_orbax_files_are_a_typed_error_or_harmless(name, raw, entry):
    (entry / "arrays" / name).write_bytes(raw)
    entries.reseal(entry)
    try:
        assert storage.load_artifact(entry.parent, entry.name) == entries.make_artifact()
    except errors.IntegrityError as error:
        assert error.artifact == entry.name


@pytest.mark.parametrize("name", ["arrays/state/logits/0", "arrays/extra"])
def test_a_terabyte_is_refused_before_it_is_hashed(name, entry, monkeypatch):
    """A hole in a file costs its maker nothing; hashing it would cost the reader hours."""
    with open(entry / name, "ab") as file:
        file.truncate(1 << 40)
    path = entry / container.SEAL
    document = json.loads(path.read_bytes())
    document["files"][name] = {"bytes": 1 << 40, "sha256": "0" * 64}
    path.write_bytes(digest.canonical_json(document))
    monkeypatch.setattr(digest, "file_digest", lambda path: pytest.fail(f"{path} was hashed"))
    entries.assert_refused(entry, "no such file" if name == "arrays/extra" else "bytes")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    store = tmp_path / "store"
    store.mkdir()
    (store / ".lock").symlink_to(elsewhere)
    with pytest.raises(errors.StorageError, match="lock"):
        storage.save_artifact(entries.make_artifact(), store)
    assert not elsewhere.exists()
