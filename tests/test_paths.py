"""Paths as callers give them: what they mean, what is refused, and that every public function reads them alike."""

import os
import pathlib

import pytest

import kvgraft_jax as kg
from kvgraft_jax import paths
from tests import tiny

REFUSED = {
    "none": None,
    "a number": 3,
    "bytes": b"arts",
    "empty": "",
    "a NUL": "a\0b",
    "an address": "s3://bucket/arts",
    "an address as a path": pathlib.Path("gs://bucket/arts"),
    "a file address": "file:///arts",
    "a home that nobody has": "~nobody-of-that-name/arts",
    "a function": os.fsencode,
}


class Bytes(os.PathLike):
    """A path-like object that gives bytes."""

    def __fspath__(self):
        """Gives bytes."""
        return b"arts"


@pytest.mark.parametrize("path", [*REFUSED.values(), Bytes()], ids=[*REFUSED, "a path of bytes"])
def test_what_is_no_path_is_refused_by_name(path):
    with pytest.raises(kg.InputError, match=r"^directory: got ") as caught:
        paths.absolute(path, "directory")
    assert repr(path)[:40] in str(caught.value)


def test_paths_are_absolute_and_home_directories_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.absolute("arts", "directory") == tmp_path / "arts"
    assert paths.absolute(pathlib.Path("arts"), "directory") == tmp_path / "arts"
    assert paths.absolute("~/arts", "directory") == tmp_path / "home" / "arts"
    assert paths.absolute("./~/arts", "directory") == tmp_path / "~" / "arts"
    assert paths.absolute("a~/arts", "directory") == tmp_path / "a~" / "arts"
    assert paths.absolute("./s3://bucket", "directory") == tmp_path / "s3:" / "bucket"


def test_dots_behind_a_link_are_what_the_system_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("disk/sub")
    os.makedirs("disk/arts")
    os.mkdir("home")
    os.symlink("../disk/sub", "home/data")
    os.symlink("nothing", "disk/arts/link")
    assert paths.absolute("home/data/../arts/link", "directory") == tmp_path.resolve() / "disk" / "arts" / "link"
    assert paths.absolute("home/data/../../disk/../new", "directory") == tmp_path.resolve() / "new"


def test_a_working_directory_that_is_gone_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(kg.InputError, match="working directory is gone"):
        paths.absolute("arts", "directory")
    assert paths.absolute("/arts", "directory") == pathlib.Path("/arts")


@pytest.mark.parametrize("name", ["CORP\\user", "a\\", os.fsdecode(b"a\xffb")], ids=["backslash", "last", "not UTF-8"])
def test_paths_that_orbax_cannot_use_are_refused(tmp_path, name):
    with pytest.raises(kg.InputError, match="link"):
        paths.check_plain(tmp_path / name / "arts", "directory")


@pytest.mark.parametrize("name", ["a b", "a%20b", "a#b", "a?b", "a\nb", "é", "a:b", "$HOME", "[a]*"])
def test_other_paths_are_not(tmp_path, name):
    paths.check_plain(tmp_path / name, "directory")


@pytest.fixture(scope="module")
def artifact():
    engine = tiny.engine()
    return engine.capture(engine.prefill([1, 2, 3]))


STORAGE = {
    "save": kg.save_artifact,
    "load": lambda artifact, directory: kg.load_artifact(directory, artifact.artifact_id),
    "list": lambda artifact, directory: kg.list_artifacts(directory),
}
UNSTORABLE = {"backslash": "CORP\\user/arts", "backslash at the end": "arts\\", "not UTF-8": os.fsdecode(b"a\xffb")}


@pytest.mark.parametrize("call", STORAGE.values(), ids=STORAGE)
@pytest.mark.parametrize("path", [*REFUSED.values(), *UNSTORABLE.values()], ids=[*REFUSED, *UNSTORABLE])
def test_storage_refuses_them_and_leaves_nothing(tmp_path, monkeypatch, artifact, call, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kg.InputError, match="^directory: got "):
        call(artifact, path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["~/arts", "home/data/../arts", "a b/%20#?\n/é"])
def test_save_list_and_load_mean_the_same_directory(tmp_path, monkeypatch, artifact, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "house"))
    os.makedirs("disk/sub")
    os.mkdir("home")
    os.symlink("../disk/sub", "home/data")
    artifact_id = kg.save_artifact(artifact, path)
    assert kg.list_artifacts(path) == (artifact_id,)
    assert kg.load_artifact(path, artifact_id) == artifact
    assert artifact_id in os.listdir(os.path.expanduser(path))


@pytest.mark.parametrize(
    "uri",
    ["gguf:s3://b/x", "gguf:~nobody-of-that-name/x", "gguf:a\0b", "orbax:gs://b/x", "orbax:CORP\\x", "hf:./a\0b"],
)
def test_load_model_refuses_them_by_name(uri):
    with pytest.raises(kg.InputError, match=": got "):
        kg.load_model(uri)
