"""The cache directory: digests of files computed once, small values by key; nothing depends on it."""

from __future__ import annotations

import hashlib
import os
import pathlib

import pytest

from kvgraft_jax import digest, errors, remembered


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> pathlib.Path:
    """Returns a cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "_SETTLED_NS", 0)
    return tmp_path / "cache" / "kvgraft_jax"


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Returns the paths that were hashed."""
    found, file_digest = [], digest.file_digest
    monkeypatch.setattr(digest, "file_digest", lambda path: found.append(path) or file_digest(path))
    return found


def _file(path: pathlib.Path, content: bytes = b"content") -> pathlib.Path:
    path.write_bytes(content)
    return path


def test_a_file_is_hashed_once(tmp_path, hashed):
    path = _file(tmp_path / "a")
    wanted = hashlib.sha256(b"content").hexdigest()
    assert [remembered.file_digest(path) for _ in range(3)] == [wanted] * 3 and len(hashed) == 1


def test_a_file_of_the_same_size_and_time_with_other_bytes_is_hashed_again(tmp_path):
    path = _file(tmp_path / "a")
    before, status = remembered.file_digest(path), path.stat()
    path.write_bytes(b"c0ntent")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert remembered.file_digest(path) == hashlib.sha256(b"c0ntent").hexdigest() != before
    os.replace(_file(tmp_path / "b", b"C0ntent"), path)
    assert remembered.file_digest(path) == hashlib.sha256(b"C0ntent").hexdigest()


def test_a_file_written_just_now_is_not_remembered(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(remembered, "_SETTLED_NS", 2_000_000_000)
    path = _file(tmp_path / "a")
    assert remembered.file_digest(path) == remembered.file_digest(path) and len(hashed) == 2


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        remembered.file_digest(tmp_path / "none")


def test_values_by_key():
    assert remembered.get(["a", 1]) is None
    assert remembered.put(["a", 1], {"x": [1, "ü"]}) and remembered.put(["a", "1"], 2)
    assert remembered.get(["a", 1]) == {"x": [1, "ü"]} and remembered.get(["a", "1"]) == 2
    assert remembered.put(["a", 1], 3) and remembered.get(["a", 1]) == 3


def test_every_damage_of_an_entry_is_as_good_as_none(cache):
    remembered.put("key", "value")
    (entry,) = (cache / "remembered").iterdir()
    raw = entry.read_bytes()
    for index in range(len(raw)):
        entry.write_bytes(raw[:index])
        assert remembered.get("key") is None
        entry.write_bytes(raw[:index] + bytes([raw[index] ^ 1]) + raw[index + 1 :])
        assert remembered.get("key") is None
    entry.write_bytes(raw)
    assert remembered.get("key") == "value"
    assert remembered.put("other", "value")
    other = next(path for path in (cache / "remembered").iterdir() if path != entry)
    other.write_bytes(raw)  # an entry under another one's name
    assert remembered.get("other") is None


def test_without_a_directory_that_can_be_written_nothing_is_remembered_and_nothing_fails(
    tmp_path, cache, hashed, monkeypatch
):
    _file(tmp_path / "cache")  # a file where the directory would be
    path = _file(tmp_path / "a")
    assert not remembered.put("key", 1) and remembered.get("key") is None
    assert remembered.file_digest(path) == remembered.file_digest(path) and len(hashed) == 2
    with pytest.raises(errors.StorageError, match=f"weights: cannot be kept in {cache}.*XDG_CACHE_HOME"):
        remembered.required_directory("weights")


def test_without_a_home_there_is_no_directory(monkeypatch):
    def homeless() -> pathlib.Path:
        raise RuntimeError("no home")

    for root in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", root)
        assert remembered.directory() == pathlib.Path.home() / ".cache" / "kvgraft_jax"
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert remembered.directory() is None and not remembered.put("key", 1) and remembered.get("key") is None
    with pytest.raises(errors.StorageError, match="weights: no home directory is known.*XDG_CACHE_HOME"):
        remembered.required_directory("weights")


def test_writing_leaves_no_scratch_file_behind(cache, monkeypatch):
    remembered.put("key", 1)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    assert not remembered.put("key", 2) and remembered.get("key") == 1
    assert len(list((cache / "remembered").iterdir())) == 1
