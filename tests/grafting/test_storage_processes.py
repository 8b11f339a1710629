"""Deposits that are killed, that race, or that meet a full disk: entries are absent or whole, leftovers are swept."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvgraft_jax import errors
from kvgraft_jax.grafting import container, storage
from tests import entries

stored, entry = entries.stored, entries.entry


def run(code, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=pathlib.Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


# Forks depositors before any thread exists, and kills each at a random moment of its deposits. They import the package
# themselves, so each one runs Orbax, as a process does that was not forked.
KILLER = """
import itertools, os, random, signal, sys, time
from orbax.checkpoint import v1
rng = random.Random(3)
for round in range(int(sys.argv[2])):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        from kvgraft_jax.grafting import storage
        from tests import entries
        os.write(writing, b"x")
        for number in itertools.count(1000 * round):
            storage.save_artifact(entries.make_artifact(number), sys.argv[1])
    os.read(reading, 1)
    time.sleep(rng.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reading), os.close(writing)
print(sum(name.startswith(".writing-") for name in os.listdir(sys.argv[1])))
"""


def kill_depositors(directory, rounds):
    """Returns how many entries there are; each was loaded, and nothing else was left after the next deposit."""
    process = run(KILLER, directory, rounds)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert int(out) <= 1, "each deposit sweeps what dead ones left"
    ids = storage.list_artifacts(directory)
    for artifact_id in ids:
        assert storage.load_artifact(directory, artifact_id).artifact_id == artifact_id
    storage.save_artifact(entries.make_artifact(999_999), directory)
    assert set(os.listdir(directory)) == {*ids, entries.make_artifact(999_999).artifact_id, ".lock"}
    return len(ids)


def test_a_killed_depositor_leaves_nothing_or_a_whole_entry(tmp_path):
    storage.save_artifact(entries.make_artifact(999_998), tmp_path)
    assert kill_depositors(tmp_path, 12) > 6
    assert storage.load_artifact(tmp_path, entries.make_artifact(999_998).artifact_id) == entries.make_artifact(999_998)


FORKED = """
import os, sys
from kvgraft_jax.grafting import storage
from tests import entries
if not os.fork():
    print(os.getpid(), flush=True)
    storage.save_artifact(entries.make_artifact(), sys.argv[1])
os.wait()
"""


def test_a_killed_forked_depositor_leaves_no_process_that_goes_on_writing(tmp_path):
    process = run(FORKED, tmp_path)
    forked = int(process.stdout.readline())
    while not list(tmp_path.glob(f"{container._SCRATCH}*/save.log")):  # It runs Orbax in a process of its own.
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(forked, signal.SIGKILL)
    process.communicate()
    artifact_id = storage.save_artifact(entries.make_artifact(1), tmp_path)  # Sweeps, while Orbax is being imported.
    time.sleep(6.0)
    assert set(os.listdir(tmp_path)) == {artifact_id, ".lock"}


def test_scratch_directories_of_the_living_are_kept_and_those_of_the_dead_swept(tmp_path):
    (tmp_path / ".writing-dead" / "entry").mkdir(parents=True)
    (tmp_path / ".writing-dead" / "entry" / "half").write_bytes(b"x")
    with container.writing(tmp_path) as living:
        (living / "half").write_bytes(b"x")
        storage.save_artifact(entries.make_artifact(), tmp_path)
        assert (living / "half").read_bytes() == b"x"
        assert entries.scratch_directories(tmp_path) == [living.parent.name]
    assert not entries.scratch_directories(tmp_path)


def test_processes_that_deposit_the_same_ids_and_one_that_dies(tmp_path):
    code = (
        "import sys; from kvgraft_jax.grafting import storage; from tests import entries\n"
        "print('ready', flush=True)\n"
        "for number in range(8): storage.save_artifact(entries.make_artifact(number), sys.argv[1])\n"
    )
    processes = [run(code, tmp_path) for _ in range(3)]
    for process in processes:
        process.stdout.readline()
    seen = set()
    while processes[0].poll() is None or processes[1].poll() is None:
        for artifact_id in storage.list_artifacts(tmp_path):
            seen.add(storage.load_artifact(tmp_path, artifact_id).artifact_id)
        if seen and processes[2].poll() is None:
            processes[2].kill()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes[:2]] == [0, 0]
    assert (
        set(storage.list_artifacts(tmp_path))
        == {entries.make_artifact(number).artifact_id for number in range(8)}
        >= seen
    )
    storage.save_artifact(entries.make_artifact(8), tmp_path)
    assert not entries.scratch_directories(tmp_path)


def test_a_full_disk_is_a_clear_error_and_the_next_deposit_works(tmp_path):
    storage.save_artifact(entries.make_artifact(1), tmp_path)
    code = """
import os, resource, sys
from kvgraft_jax import errors
from kvgraft_jax.grafting import storage
from tests import entries
artifact = entries.make_artifact(2, vocabulary=100_000)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (100, 1000, 200_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    try:
        storage.save_artifact(artifact, sys.argv[1])
    except errors.StorageError as error:
        assert artifact.artifact_id in str(error) and sys.argv[1] in str(error), error
    else:
        raise AssertionError(limit)
    assert sorted(os.listdir(sys.argv[1])) == [".lock", entries.make_artifact(1).artifact_id]
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
storage.save_artifact(artifact, sys.argv[1])
"""
    process = run(code, tmp_path)
    process.communicate(timeout=60)
    assert process.returncode == 0
    for artifact in (entries.make_artifact(1), entries.make_artifact(2, vocabulary=100_000)):
        assert storage.load_artifact(tmp_path, artifact.artifact_id) == artifact


def test_what_threads_of_a_failed_save_still_write_is_removed_too(tmp_path, monkeypatch):
    rmtree, tries = shutil.rmtree, []

    def while_another_writes(path, ignore_errors):
        """Leaves a file the first time, as if it had been written after its directory was listed."""
        rmtree(path, ignore_errors=ignore_errors)
        tries.append(path)
        if len(tries) == 1:
            (path / "entry").mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", while_another_writes)
    with container.writing(tmp_path):
        pass
    assert os.listdir(tmp_path) == [".lock"] and len(tries) == 2


INTERRUPTED = """
import itertools, os, signal, sys, threading
from kvgraft_jax.grafting import orbax_arrays, storage
from tests import entries
save = orbax_arrays.ocp.save
def interrupted(*given, **more):
    threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT)).start()
    save(*given, **more)
orbax_arrays.ocp.save = interrupted
try:
    for number in itertools.count(): storage.save_artifact(entries.make_artifact(number), sys.argv[1])
except KeyboardInterrupt:
    print(*os.listdir(sys.argv[1]))
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.02, 0.03])
def test_an_interrupt_during_a_save_ends_the_process_and_leaves_nothing(tmp_path, delay_s):
    process = run(INTERRUPTED, tmp_path, delay_s)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and set(out.split()) <= {".lock", entries.make_artifact(0).artifact_id}


def test_another_user_may_lock_what_it_may_not_write(tmp_path):
    tmp_path.chmod(0o2777)
    before = os.umask(0o077)
    try:
        with container._locked(tmp_path):
            pass
    finally:
        os.umask(before)
    lock = tmp_path / ".lock"
    assert lock.stat().st_mode & 0o777 == 0o666  # As the directory, whatever the first user's umask.
    lock.chmod(0o444)
    with container._locked(tmp_path), pytest.raises(BlockingIOError), container._flock(container._open(lock), 4):
        pass


def test_a_lock_that_another_holds_is_told_and_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(container, "_PATIENCE_S", 0.2)
    with container._locked(tmp_path):
        thread = threading.Thread(target=lambda: storage.save_artifact(entries.make_artifact(), tmp_path))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive() and storage.list_artifacts(tmp_path) == ()
    thread.join(30)
    assert f"waiting for {tmp_path / '.lock'}, which another process has locked" in capsys.readouterr().err
    assert storage.list_artifacts(tmp_path) == (entries.make_artifact().artifact_id,)


@pytest.mark.parametrize(
    "name", [".DS_Store", "arrays/._state", "arrays/state/full/.DS_Store", "arrays/state/full/0.0"]
)
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_foreign_file_is_refused_with_what_to_delete(entry, name, is_sealed):
    (entry / name).write_bytes(b"x")
    if is_sealed:
        entries.reseal(entry)
    with pytest.raises(errors.IntegrityError, match=f"delete '{entry / name}'"):
        storage.load_artifact(entry.parent, entry.name)
    (entry / name).unlink()
    if is_sealed:
        entries.reseal(entry)
    assert storage.load_artifact(entry.parent, entry.name)


@pytest.mark.parametrize("name", [".lock", ".writing-x"])
def test_a_pipe_in_the_way_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    if name == ".lock":
        with pytest.raises(errors.StorageError, match="special file stands where the lock should be; delete it"):
            storage.save_artifact(entries.make_artifact(), tmp_path)
        (tmp_path / name).unlink()
    assert storage.save_artifact(entries.make_artifact(), tmp_path) in storage.list_artifacts(tmp_path)
