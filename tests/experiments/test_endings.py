"""However an experiment ends, none of its scratch files is left: after a signal at once, after a kill with the next."""

import os
import signal
import subprocess
import sys
import time

import pytest

from experiments import harness, scratch

SMALL = ("--config=configs/exactness_small.py",)


def start(name, *arguments, **environment):
    """Starts an experiment in a process of its own, which hears of a terminal that goes even where nohup runs this."""
    heard = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", f"experiments.{name}", *arguments],
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGHUP, heard)


def wait_for(process, folder, pattern):
    """Returns when there is a file that fits, or the process has ended."""
    while process.poll() is None and not list(folder.glob(pattern)):
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "code"),
    [("graft_exactness", signal.SIGHUP, 129), ("schedule_invariance", signal.SIGTERM, 143)],
)
def test_a_signal_leaves_no_scratch_files(tmp_path, name, number, code):
    process = start(name, *SMALL, f"--out={tmp_path}")
    wait_for(process, tmp_path, ".scratch-*")
    process.send_signal(number)
    assert process.communicate()[1].strip().endswith(number.name)
    assert process.returncode == code
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_signal_ends_the_recipient_too(tmp_path):
    process = start("graft_exactness", *SMALL, f"--out={tmp_path}")
    wait_for(process, tmp_path, ".scratch-*/job.json")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_what_a_killed_run_left_goes_with_the_next(tmp_path):
    process = start("graft_exactness", *SMALL, f"--out={tmp_path}")
    wait_for(process, tmp_path, ".scratch-*")
    process.kill()
    process.communicate()
    assert [name.startswith(".scratch-") for name in os.listdir(tmp_path)] == [True]
    assert harness.new_folder(tmp_path) == tmp_path
    assert os.listdir(tmp_path) == []


def test_scratch_files_of_a_living_run_stay(tmp_path):
    with scratch.folder(tmp_path) as living:
        with scratch.folder(tmp_path) as another:
            assert sorted(tmp_path.iterdir()) == sorted([living, another])
        assert list(tmp_path.iterdir()) == [living]
    assert list(tmp_path.iterdir()) == []


IN_A_CALLBACK = """
import gc, os, pathlib, sys, time
from experiments import harness, scratch

number, parent = int(sys.argv.pop()), pathlib.Path(sys.argv.pop())

def run():
    with scratch.folder(parent):
        gc.callbacks.append(lambda *_: gc.callbacks.clear() or os.kill(os.getpid(), number))
        gc.collect()
        time.sleep(60)
    return 0

harness.start("run", run)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_that_comes_in_a_callback_of_the_garbage_collector_is_not_lost(tmp_path, number, code):
    command = [sys.executable, "-c", IN_A_CALLBACK, str(tmp_path), str(int(number))]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=50)
    assert process.returncode == code, process.stderr
    assert "ignored" not in process.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.weights
def test_a_signal_leaves_nothing_of_the_demo(tmp_path):
    process = start("demo", TMPDIR=str(tmp_path))
    wait_for(process, tmp_path, "kvgraft-demo-*")
    process.terminate()
    process.communicate()
    assert process.returncode == 143
    assert os.listdir(tmp_path) == []
