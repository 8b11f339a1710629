"""What is shown on stderr decides nothing: bars and lines where it is gone, closed, full or an object of its own."""

import io
import subprocess
import sys

import jax
import pytest

from experiments import harness
import kvgraft_jax as kg
from kvgraft_jax import errors, progress
from tests import tiny

_SHOW_ALL = """
import sys
from kvgraft_jax import progress
progress.say("a line")
with progress.bar(3, description="bytes", in_thousands=True) as bar:
    for item in progress.each([1, 2, 3], description="items", unit="item"):
        bar.update(1)
progress.is_terminal()
print("done")
"""


class _WritesOnly:
    def write(self, text):
        return len(text)


class _Broken:
    def write(self, *_):
        raise RuntimeError("no write")

    flush = isatty = fileno = write


@pytest.mark.parametrize("stderr", [None, _WritesOnly(), _Broken()], ids=["none", "writes only", "broken"])
def test_bars_and_lines_do_without_stderr(monkeypatch, capsys, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    progress.say("a line")
    with progress.bar(6, description="bytes") as bar:
        bar.update(3)
        seen = list(progress.each(range(3), description="items", unit="item"))
        bar.update(3)
    assert seen == [0, 1, 2]
    assert not progress.is_terminal()
    monkeypatch.undo()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("stderr", [None, _WritesOnly(), _Broken()], ids=["none", "writes only", "broken"])
def test_a_large_model_loads_and_a_prefill_shows_its_bar_without_stderr(monkeypatch, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    model = kg.load_model("random:gemma-3-270m?layers=1&vocab=90000")
    assert sum(array.nbytes for array in jax.tree.leaves(model.params)) > 100_000_000
    assert tiny.engine().prefill([1, 2, 3], progress=True).token_ids == (1, 2, 3)


def test_an_experiment_that_is_refused_says_so_by_its_exit_code_without_stderr(monkeypatch):
    def refuse():
        raise errors.ConfigError("no such thing")

    def fail():
        raise ZeroDivisionError

    for stderr in (None, _Broken()):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert harness.guard("name", refuse) == harness.guard("name", fail) == harness.REFUSED


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_certificate_that_cannot_be_read_is_refused_without_stderr(redirection):
    command = f'"$0" -m experiments.check_certificate shift 1 {redirection}'
    assert subprocess.run(["bash", "-c", command, sys.executable]).returncode == 2


def test_closed_stderr(monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    progress.say("a line")
    assert list(progress.each(range(3), description="items", unit="item")) == [0, 1, 2]
    assert not progress.is_terminal()


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2>/dev/null"])
def test_a_process_without_a_working_stderr_ends_well(redirection):
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, _SHOW_ALL], stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_working_stderr_shows_lines_and_bars(capsys):
    progress.say("a line")
    assert list(progress.each(range(3), description="items", unit="item")) == [0, 1, 2]
    shown = capsys.readouterr().err
    assert shown.startswith("a line\n")
    assert "items: 100%" in shown and "3/3" in shown


def test_a_line_on_stdout_makes_way_for_bars(capsys):
    with progress.bar(3, description="items", unit="item") as bar:
        progress.print_line("a line")
        bar.update(3)
    shown = capsys.readouterr()
    assert shown.out == "a line\n"
    assert "items: 100%" in shown.err


def test_a_hidden_bar_shows_nothing(capsys):
    with progress.bar(3, is_shown=False) as bar:
        bar.update(3)
    assert capsys.readouterr().err == ""


def test_no_thread_watches_a_bar():
    code = (
        "import threading; from kvgraft_jax import progress\n"
        "with progress.bar(3) as bar: print(threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
