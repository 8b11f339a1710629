"""Storage: the same bits come back, or a typed error names what is wrong, whatever happened to the disk."""

import asyncio
from concurrent import futures
import dataclasses
import errno
import os
import pathlib
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kvgraft_jax import digest, errors
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import container, storage
from tests import entries

stored, entry = entries.stored, entries.entry


# --- round trips


@pytest.mark.parametrize("dtype", [entries.BF16, np.float32])
def test_round_trip(dtype, tmp_path):
    artifact = entries.make_artifact(dtype=dtype)
    assert storage.save_artifact(artifact, tmp_path / "new" / "folder") == artifact.artifact_id
    loaded = storage.load_artifact(tmp_path / "new" / "folder", artifact.artifact_id)
    assert loaded == artifact and loaded.manifest == artifact.manifest and loaded.token_ids == artifact.token_ids
    assert loaded.provenance == artifact.provenance and loaded.pin == artifact.pin
    for ours, theirs in zip(loaded.stacks, artifact.stacks, strict=True):
        assert (ours.kind, ours.layers, ours.start, ours.dtype) == (
            theirs.kind,
            theirs.layers,
            theirs.start,
            theirs.dtype,
        )
        assert ours.kv_Lx2xSxKxH.tobytes() == theirs.kv_Lx2xSxKxH.tobytes()
        assert type(ours.kv_Lx2xSxKxH) is np.ndarray and not ours.kv_Lx2xSxKxH.flags.writeable
    assert loaded.logits_V.tobytes() == artifact.logits_V.tobytes()


def test_every_finite_bfloat16_pattern_survives_the_disk(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & 0x7FFF) < 0x7F80]
    kv = np.concatenate([bits, bits[-1:].repeat(-len(bits) % 10)]).reshape(1, 2, 5, 1, -1)
    artifact = dataclasses.replace(
        entries.make_artifact(), stacks=(artifact_lib.KVStack("full", (0,), 0, kv.view(entries.BF16)),)
    )
    loaded = storage.load_artifact(tmp_path, storage.save_artifact(artifact, tmp_path))
    assert np.array_equal(loaded.stacks[0].kv_Lx2xSxKxH.view(np.uint16), kv)


def test_float32_specials_survive_the_disk(tmp_path):
    specials = [0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x3F800001]
    bits = np.array(specials, np.uint32)
    stack = artifact_lib.KVStack("full", (0,), 0, bits.view(np.float32).reshape(1, 2, 5, 1, 1))
    artifact = dataclasses.replace(entries.make_artifact(), stacks=(stack,), logits_V=bits.view(np.float32))
    loaded = storage.load_artifact(tmp_path, storage.save_artifact(artifact, tmp_path))
    assert np.array_equal(loaded.logits_V.view(np.uint32), bits)
    assert np.array_equal(loaded.stacks[0].kv_Lx2xSxKxH.view(np.uint32).ravel(), bits)


def test_a_copy_elsewhere_and_another_process_load_the_same(stored, tmp_path):
    shutil.copytree(stored, tmp_path / "elsewhere")
    artifact_id = entries.make_artifact().artifact_id
    assert storage.load_artifact(tmp_path / "elsewhere", artifact_id) == entries.make_artifact()
    code = (
        "import sys; from kvgraft_jax.grafting import storage;"
        "print(storage.load_artifact(sys.argv[1], sys.argv[2]).state_digest)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "elsewhere"), artifact_id]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert out.strip() == entries.make_artifact().state_digest


def test_no_file_names_the_place_where_it_was_made(stored):
    for path in entries.files_of(stored / entries.make_artifact().artifact_id):
        assert str(stored).encode() not in path.read_bytes(), path


def test_inside_a_running_event_loop(tmp_path):
    artifact = entries.make_artifact()

    async def both():
        return storage.load_artifact(tmp_path, storage.save_artifact(artifact, tmp_path))

    assert asyncio.run(both()) == artifact


def test_threads_that_save_and_load_at_once(tmp_path):
    artifacts = [entries.make_artifact(number) for number in range(8)]

    def work(shift):
        for i in range(8):
            artifact = artifacts[(i + 3 * shift) % 8]
            assert storage.load_artifact(tmp_path, storage.save_artifact(artifact, tmp_path)) == artifact

    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert set(storage.list_artifacts(tmp_path)) == {artifact.artifact_id for artifact in artifacts}
    assert not entries.scratch_directories(tmp_path)


def test_a_relative_directory_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    artifact_id = storage.save_artifact(entries.make_artifact(), "here")
    assert storage.load_artifact("here", artifact_id) == entries.make_artifact()


# --- what is there, and what is not


def test_list_gives_the_entries_alone(stored, tmp_path):
    assert storage.list_artifacts(stored) == (entries.make_artifact().artifact_id,)
    assert storage.list_artifacts(tmp_path / "nowhere") == ()
    for name in (".writing-x", "notes", "A" * 64, "0" * 63):
        (tmp_path / name).mkdir()
    assert storage.list_artifacts(tmp_path) == ()


def test_a_missing_artifact_is_not_found(stored, tmp_path):
    for directory in (stored, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(errors.ArtifactNotFound, match="0" * 64):
            storage.load_artifact(directory, "0" * 64)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "..",
        ".",
        "../" + "0" * 64,
        "0" * 63,
        "0" * 65,
        "A" * 64,
        "0" * 64 + "\n",
        "0" * 63 + "/",
        None,
        7,
        b"0" * 64,
    ],
)
def test_what_is_not_an_id_is_refused_before_the_disk_is_touched(bad, stored):
    with pytest.raises(errors.InputError, match="artifact id"):
        storage.load_artifact(stored, bad)


def test_an_entry_deleted_while_it_is_read_is_not_found(entry, monkeypatch):
    verify = container.verify

    def delete_then_verify(path, artifact_id, check_sizes):
        shutil.rmtree(path)
        return verify(path, artifact_id, check_sizes)

    monkeypatch.setattr(container, "verify", delete_then_verify)
    with pytest.raises(errors.ArtifactNotFound):
        storage.load_artifact(entry.parent, entry.name)


def test_an_intact_entry_is_kept_and_a_damaged_one_replaced(entry):
    seal = (entry / container.SEAL).read_bytes()
    assert storage.save_artifact(entries.make_artifact(), entry.parent) == entry.name
    assert (entry / container.SEAL).read_bytes() == seal
    (entry / "manifest.json").write_bytes(b"{}")
    entries.assert_refused(entry, "manifest.json")
    assert storage.save_artifact(entries.make_artifact(), entry.parent) == entry.name
    assert storage.load_artifact(entry.parent, entry.name) == entries.make_artifact()
    assert not entries.scratch_directories(entry.parent)


@pytest.mark.parametrize(
    "make",
    [lambda path: path.write_bytes(b"x"), lambda path: path.symlink_to("/"), os.mkdir],
    ids=["file", "link", "folder"],
)
def test_something_else_in_the_place_of_an_entry_is_replaced(make, tmp_path):
    make(tmp_path / entries.make_artifact().artifact_id)
    entries.assert_refused(tmp_path / entries.make_artifact().artifact_id)
    assert (
        storage.load_artifact(tmp_path, storage.save_artifact(entries.make_artifact(), tmp_path))
        == entries.make_artifact()
    )


def test_changing_the_sources_during_and_after_a_deposit_changes_nothing(tmp_path):
    logits_V = np.ones(12, np.float32)
    artifact = dataclasses.replace(entries.make_artifact(), logits_V=logits_V)
    artifact_id = storage.save_artifact(artifact, tmp_path)
    logits_V[:] = 2
    loaded = storage.load_artifact(tmp_path, artifact_id)
    assert loaded.logits_V.tolist() == [1.0] * 12 and storage.save_artifact(loaded, tmp_path) == artifact_id


def test_a_save_prints_nothing(tmp_path):
    code = (
        "import sys; from kvgraft_jax.grafting import storage; from tests import entries;"
        "storage.save_artifact(entries.make_artifact(), sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "" and "OCDBT" not in done.stderr


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.StorageError, match="file"):
        storage.save_artifact(entries.make_artifact(), tmp_path / "file" / "below")
    with pytest.raises(errors.ArtifactNotFound):
        storage.load_artifact(tmp_path / "file" / "below", entries.make_artifact().artifact_id)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_what_cannot_be_read_is_no_damage(entry, monkeypatch, code):
    def refuse(path):
        raise OSError(code, os.strerror(code), str(path))

    intact = storage.load_artifact(entry.parent, entry.name)
    with monkeypatch.context() as patch:
        patch.setattr(digest, "file_digest", refuse)
        for call in (
            lambda: storage.load_artifact(entry.parent, entry.name),
            lambda: storage.save_artifact(intact, entry.parent),
        ):
            with pytest.raises(errors.StorageError, match="could not be read"):
                call()
        patch.setattr(os, "listdir", refuse)
        with pytest.raises(errors.StorageError, match="could not be read"):
            storage.list_artifacts(entry.parent)
    assert storage.load_artifact(entry.parent, entry.name) == intact


def test_bytes_that_were_written_wrong_are_found_before_the_entry_appears(tmp_path, monkeypatch):
    write = storage._write

    def write_wrong(entry, artifact):
        write(entry, artifact)
        path = entry / "arrays" / "state" / "logits" / "0"
        raw = bytearray(path.read_bytes())
        raw[7] ^= 1
        path.write_bytes(raw)

    monkeypatch.setattr(storage, "_write", write_wrong)
    with pytest.raises(errors.StorageError, match="logits: leaf 0 of 1"):
        storage.save_artifact(entries.make_artifact(), tmp_path)
    assert storage.list_artifacts(tmp_path) == () and not entries.scratch_directories(tmp_path)


def test_files_and_folders_are_flushed_before_the_rename_and_the_directory_after_it(tmp_path, monkeypatch):
    flushed, renamed = [], []
    fsync, rename = os.fsync, os.rename

    def identity(status):
        return status.st_dev, status.st_ino

    def note_flush(descriptor):
        flushed.append(identity(os.fstat(descriptor)))
        fsync(descriptor)

    def note_rename(source, target):
        if target == place:
            renamed.append(len(flushed))
        rename(source, target)

    place = tmp_path / entries.make_artifact().artifact_id
    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(os, "rename", note_rename)
    storage.save_artifact(entries.make_artifact(), tmp_path)
    (before,) = renamed
    assert {identity(path.stat()) for path in (place, *place.rglob("*"))} <= set(flushed[:before])
    assert identity(tmp_path.stat()) in flushed[before:]


# --- damage


def test_flipped_bits_all_over_the_seal(entry):
    rng = random.Random(1)
    raw = (entry / container.SEAL).read_bytes()
    for at in range(0, len(raw), 3):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << rng.randrange(8)
        (entry / container.SEAL).write_bytes(flipped)
        with pytest.raises(errors.IntegrityError) as caught:
            container.verify(entry, entry.name, lambda sizes: None)
        assert caught.value.artifact == entry.name
    (entry / container.SEAL).write_bytes(raw)
    container.verify(entry, entry.name, lambda sizes: None)


def test_flipped_bits_anywhere(entry):
    rng = random.Random(2)
    for path in entries.files_of(entry):
        raw = path.read_bytes()
        for _ in range(40 if raw else 0):
            at = rng.randrange(len(raw) * 8)
            flipped = bytearray(raw)
            flipped[at // 8] ^= 1 << at % 8
            path.write_bytes(flipped)
            entries.assert_refused(entry)
        path.write_bytes(raw)
    assert storage.load_artifact(entry.parent, entry.name) == entries.make_artifact()


def test_truncation_a_trailing_byte_and_a_missing_file(entry):
    for path in entries.files_of(entry):
        name, raw = path.relative_to(entry).as_posix(), path.read_bytes()
        for size in {0, 1, len(raw) // 2, len(raw) - 1} & set(range(len(raw))):
            path.write_bytes(raw[:size])
            entries.assert_refused(entry, name)
        for extra in (b"\0", b"\n"):
            path.write_bytes(raw + extra)
            entries.assert_refused(entry, name)
        path.unlink()
        entries.assert_refused(entry, name)
        path.write_bytes(raw)
    assert storage.load_artifact(entry.parent, entry.name) == entries.make_artifact()


def test_extra_files_folders_links_and_pipes(entry):
    target = entry / "arrays" / "state" / "logits"
    for name, make in (
        ("extra", lambda path: path.write_bytes(b"")),
        ("extra.pkl", lambda path: path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")),
        ("folder", os.mkdir),
        ("link", lambda path: path.symlink_to(target / "0")),
        ("pipe", os.mkfifo),
    ):
        make(target / name)
        entries.assert_refused(entry, name)
        shutil.rmtree(target / name) if name == "folder" else (target / name).unlink()
    os.rename(target / "0", entry.parent / "0")
    (target / "0").symlink_to(entry.parent / "0")
    entries.assert_refused(entry, "link")


def test_swapped_entries_are_refused(entry):
    other = storage.save_artifact(entries.make_artifact(1), entry.parent)
    shutil.rmtree(entry)
    shutil.copytree(entry.parent / other, entry)
    entries.assert_refused(entry, "artifact")
    entries.reseal(entry)
    entries.assert_refused(entry, other)
