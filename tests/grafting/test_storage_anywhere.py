"""Artifacts are saved and loaded in every kind of process: forked, ending, one of a job, without threads or handles."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading

import numpy as np
from orbax.checkpoint import v1 as ocp
import pytest

from kvgraft_jax import errors
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import orbax_arrays, storage
from tests import entries

ROOT = pathlib.Path(__file__).parents[2]
stored = entries.stored
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")


def start(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def load(arguments: tuple[str, str]) -> str:
    return storage.load_artifact(*arguments).artifact_id


def save(arguments: tuple[int, str]) -> str:
    return storage.save_artifact(entries.make_artifact(arguments[0]), arguments[1])


def test_orbax_reads_what_is_saved_and_a_load_reads_the_same(stored):
    artifact = entries.make_artifact()
    arrays = {"token_ids": artifact.token_ids_S, "logits": artifact.logits_V}
    arrays |= {stack.kind: stack.kv_Lx2xSxKxH for stack in artifact.stacks}
    checkpoint = stored / artifact.artifact_id / "arrays"
    template = {name: np.empty(array.shape, array.dtype) for name, array in arrays.items()}
    by_orbax = ocp.load(checkpoint, template, checkpointable_name="state")
    for name, array in arrays.items():
        read = orbax_arrays.read(checkpoint, name, array.dtype.name, array.shape)
        assert by_orbax[name].tobytes() == read.tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", ["Pool", "ProcessPoolExecutor"])
def test_forked_workers_load_and_save_after_a_save_and_a_load(tmp_path, kind):
    artifact_id = save((0, tmp_path))
    assert load((tmp_path, artifact_id)) == artifact_id
    wanted = [entries.make_artifact(number).artifact_id for number in (1, 2)]
    if kind == "Pool":
        with FORK.Pool(2) as pool:
            loaded = pool.map_async(load, [(tmp_path, artifact_id)] * 2).get(timeout=60)
            saved = pool.map_async(save, [(number, tmp_path) for number in (1, 2)]).get(timeout=120)
    else:
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=FORK) as pool:
            loaded = list(pool.map(load, [(tmp_path, artifact_id)] * 2, timeout=60))
            saved = list(pool.map(save, [(number, tmp_path) for number in (1, 2)], timeout=120))
    assert loaded == [artifact_id] * 2 and saved == wanted
    assert storage.list_artifacts(tmp_path) == tuple(sorted([artifact_id, *wanted]))
    assert storage.load_artifact(tmp_path, wanted[0]) == entries.make_artifact(1)


_JOB = """
import sys; from kvgraft_jax.grafting import storage; from tests import entries; import jax
rank, port, directory, what = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
if what == "save":
    print(storage.save_artifact(entries.make_artifact(rank), directory))
elif what == "load":
    print(storage.load_artifact(directory, storage.list_artifacts(directory)[0]).artifact_id)
sys.stdin.read()  # Both stay until both are done.
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", [("save", "wait"), ("load", "wait"), ("save", "save")], ids="-".join)
def test_a_process_of_a_distributed_job_does_not_wait_for_the_others(tmp_path, work):
    if "load" in work:
        save((0, tmp_path))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", _JOB]
    jobs = [
        subprocess.Popen(
            [*command, str(rank), port, str(tmp_path), what],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank, what in enumerate(work)
    ]  # fmt: skip
    timer = threading.Timer(60, lambda: [job.kill() for job in jobs])
    timer.start()
    try:
        said = [job.stdout.readline().strip() for job, what in zip(jobs, work, strict=True) if what != "wait"]
    finally:
        timer.cancel()
        for job in jobs:
            job.kill()
            job.wait()
            job.stdin.close()
            job.stdout.close()
    wanted = [entries.make_artifact(rank).artifact_id for rank, what in enumerate(work) if what != "wait"]
    assert said == wanted and set(wanted) <= set(storage.list_artifacts(tmp_path))


@pytest.mark.parametrize(
    "ending",
    [
        "atexit.register(deposit)",
        "atexit.register(load)",
        "threading.Thread(target=lambda: (time.sleep(1), deposit())).start()",
        "threading.Thread(target=lambda: (time.sleep(1), load())).start()",
    ],
)
def test_an_ending_process_saves_and_loads(tmp_path, ending):
    code = f"""
import atexit, sys, threading, time; from kvgraft_jax.grafting import storage; from tests import entries
def deposit(): print(storage.save_artifact(entries.make_artifact(1), sys.argv[1]), flush=True)
def load(): print(storage.load_artifact(sys.argv[1], sys.argv[2]).artifact_id, flush=True)
{ending}
"""
    number = int("deposit" in ending)
    assert finish(start(code, tmp_path, save((0, tmp_path)))) == entries.make_artifact(number).artifact_id
    assert storage.load_artifact(tmp_path, entries.make_artifact(number).artifact_id)


def test_without_threads_an_entry_is_saved_and_loaded(tmp_path, monkeypatch):
    large = entries.make_artifact(vocabulary=600_000)  # Three leaves, hashed in parallel where that is possible.

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", no_thread)
        artifact_id = storage.save_artifact(large, tmp_path)
        assert storage.load_artifact(tmp_path, artifact_id) == large
    assert storage.load_artifact(tmp_path, artifact_id) == large


def test_without_file_handles_nothing_is_called_damaged(stored):
    artifact_id = entries.make_artifact().artifact_id
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1, hard))
    try:
        with pytest.raises(errors.StorageError, match="says nothing about what is in it"):
            storage.load_artifact(stored, artifact_id)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(held)
    assert storage.load_artifact(stored, artifact_id).artifact_id == artifact_id


def test_without_memory_nothing_is_called_damaged(stored, tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr(orbax_arrays, "read", full)
    with pytest.raises(errors.ResourceError, match="out of memory"):
        storage.load_artifact(stored, entries.make_artifact().artifact_id)
    with pytest.raises(errors.ResourceError, match="out of memory"):
        storage.save_artifact(entries.make_artifact(1), tmp_path)
    assert storage.list_artifacts(tmp_path) == () and not entries.scratch_directories(tmp_path)


@pytest.mark.parametrize("call", ["load", "save"])
def test_a_mistake_of_the_program_comes_through_as_itself(stored, tmp_path, monkeypatch, call):
    def mistaken(*_):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(orbax_arrays, "read", mistaken)
    with pytest.raises(ZeroDivisionError):
        load((stored, entries.make_artifact().artifact_id)) if call == "load" else save((1, tmp_path))
    assert not entries.scratch_directories(tmp_path)


def test_the_process_that_saves_tells_why_it_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_arrays, "_can_run_here", lambda: False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(errors.StorageError, match="'spawn'"):
        save((0, tmp_path / "a"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the process that saves ended with 1"):
        save((0, tmp_path / "a"))
    assert storage.list_artifacts(tmp_path / "a") == ()


def test_similar_arguments_are_told_apart(tmp_path):
    artifact = entries.make_artifact()
    with pytest.raises(errors.InputError, match="got a str, wanted an Artifact"):
        storage.save_artifact(str(tmp_path), artifact)
    for arguments in ((tmp_path, artifact), (artifact, artifact.artifact_id)):
        with pytest.raises(errors.InputError, match=r"load_artifact\(directory, artifact_id\)"):
            storage.load_artifact(*arguments)
    assert not list(tmp_path.iterdir())


def test_a_worker_of_a_thread_pool_saves_while_the_process_waits_for_it_to_end(tmp_path):
    code = """
import sys, threading, time
from concurrent import futures
from kvgraft_jax.grafting import storage
from tests import entries
def deposit():
    while not threading._SHUTTING_DOWN: time.sleep(0.01)
    time.sleep(0.2)
    print(storage.save_artifact(entries.make_artifact(1), sys.argv[1]), flush=True)
futures.ThreadPoolExecutor(1).submit(deposit)
"""
    assert finish(start(code, tmp_path)) == entries.make_artifact(1).artifact_id
    assert storage.load_artifact(tmp_path, entries.make_artifact(1).artifact_id) == entries.make_artifact(1)


def test_threads_that_run_out_in_the_middle_of_a_save_are_done_without(tmp_path, monkeypatch):
    def no_thread(path, *_, **__):
        (path.parent / "arrays.orbax-checkpoint-tmp").mkdir()
        raise RuntimeError("can't start new thread")

    answers = iter([True, False])
    monkeypatch.setattr(orbax_arrays, "_can_run_here", lambda: next(answers))
    monkeypatch.setattr(ocp, "save", no_thread)
    assert load((tmp_path, save((0, tmp_path)))) == entries.make_artifact().artifact_id


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError])
def test_no_mistake_of_the_program_is_taken_for_damage_or_a_full_disk(error, stored, tmp_path, monkeypatch):
    def mistaken(*_, **__):
        raise error("a mistake")

    with monkeypatch.context() as patch:
        patch.setattr(artifact_lib, "KVStack", mistaken)
        with pytest.raises(error, match="a mistake"):
            storage.load_artifact(stored, entries.make_artifact().artifact_id)
    monkeypatch.setattr(ocp, "save", mistaken)
    with pytest.raises(error, match="a mistake"):
        save((1, tmp_path))
    assert not entries.scratch_directories(tmp_path)


@pytest.mark.parametrize(
    "program, wanted",
    [
        ("import os; os.abort()", errors.ResourceError),
        ("raise ZeroDivisionError('a mistake')", RuntimeError),
        ("raise MemoryError", errors.ResourceError),
        ('raise RuntimeError("can\'t start new thread")', errors.ResourceError),
        ("raise OSError(28, 'No space left on device')", errors.StorageError),
    ],
)
def test_what_ends_the_process_that_saves_decides_the_error(program, wanted, tmp_path, monkeypatch):
    popen = subprocess.Popen
    code = f"from kvgraft_jax.grafting import orbax_arrays\ndef _save(*_): {program}\n"
    code += "orbax_arrays._save_here = _save\norbax_arrays.main()"
    monkeypatch.setattr(orbax_arrays, "_can_run_here", lambda: False)
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **named: popen([command[0], "-c", code, command[-1]], **named)
    )
    with pytest.raises(wanted):
        save((0, tmp_path / "a"))
    assert not entries.scratch_directories(tmp_path / "a")


@pytest.mark.parametrize("mode, folder, file", [(0o2777, 0o777, 0o666), (0o2775, 0o770, 0o660), (0o755, 0o700, 0o600)])
def test_who_may_write_the_directory_may_read_and_replace_its_entries(mode, folder, file, tmp_path):
    tmp_path.chmod(mode)
    before = os.umask(0o077)
    try:
        place = tmp_path / save((0, tmp_path))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (place, place / "arrays", place / "arrays" / "state")} == {folder}
    assert {path.stat().st_mode & 0o777 for path in entries.files_of(place)} == {file}


def test_a_lock_is_free_again_though_a_child_was_forked_while_it_was_held(tmp_path):
    code = """
import fcntl, os, pathlib, sys
from kvgraft_jax.grafting import container
directory = pathlib.Path(sys.argv[1])
reading, writing = os.pipe()
with container._locked(directory):
    child = os.fork()
    if not child:
        os.close(writing), os.read(reading, 1), os._exit(0)
with open(directory / ".lock") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.close(writing)
print("free")
"""
    assert finish(start(code, tmp_path)) == "free"
