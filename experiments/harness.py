"""What every experiment shares: flags and settings, the output folder, result.json and report.md, and the exit code.

Exit codes: 0 the claim holds, 1 it does not, 2 the experiment could not be carried out (a message on stderr), 130 it
was interrupted, 143 it was asked to end (SIGTERM), 129 its terminal is gone (SIGHUP). Nothing that goes wrong exits
with 1. However it ends, its scratch files are removed; those of a run that was killed go with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
import typing
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from experiments import endings
from experiments import scratch as scratch_lib
import kvgraft_jax as kg
from kvgraft_jax import errors, paths, progress
from kvgraft_jax import pin as pin_lib

HOLDS, FAILS, REFUSED, INTERRUPTED = 0, 1, 2, 128 + signal.SIGINT
RESULT = "result.json"
REPORT = "report.md"

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "ml_dtypes")
_LISTS = ("checks", "tries", "rows")
_OWN_FIGURES = ("checks_held", "checks_failed", "pin_id", "seconds")
_GROUPS = ("inputs", "outputs", "config", "environment")
_HASH = re.compile(r"[0-9a-f]{64}")
_SHORT_HASH = 16


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a run found, as plain JSON data.

    Attributes:
      holds: whether the claim does.
      figures: name to number, or to a flat mapping of them; they stand at the top of result.json, under names that
        nothing else there has.
      pin: of the engine under test.
      inputs, outputs: name to SHA-256 (hex).
      rows: one flat mapping per sample or schedule, all with the same names.
      checks: one flat mapping per statement of which the claim consists, `holds` among its names; may be empty.
      tries: one flat mapping per try of a detector; may be empty.
      tables: further lists of that kind by name.
    """

    holds: bool
    figures: Mapping[str, Any]
    pin: pin_lib.Pin
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    checks: Sequence[Mapping[str, Any]] = ()
    tries: Sequence[Mapping[str, Any]] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment.

    Attributes:
      name: its module's.
      claim: one sentence that the run finds true or false.
      settings: frozen dataclass of the fields that it reads from a configuration, `model` and `dtype` among them;
        raises `ConfigError` on values that make no sense.
      run: (settings, model, out) to findings; draws its plots into the folder `out`.
    """

    name: str
    claim: str
    settings: type
    run: Callable[[Any, kg.Model, pathlib.Path], Findings]


def main(experiment: Experiment) -> None:
    """Runs an experiment as the command line asks and exits."""
    config = config_flags.DEFINE_config_file("config", help_string="configs/FILE.py; --config.FIELD=VALUE overrides")
    out = flags.DEFINE_string("out", None, "folder for the results; new or empty")

    mesh = flags.DEFINE_integer("mesh", 1, "devices over which parameters and cache are spread")
    start(experiment.name, lambda: execute(experiment, config.value, out.value, mesh.value))


def start(name: str, run: Callable[[], int]) -> None:
    """Parses the flags that are defined, runs, and exits with the code that `guard` gives."""

    def main(_: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)
        endings.raise_signals()
        return guard(name, run)

    app.run(main, flags_parser=functools.partial(_parse, name))


def guard(name: str, run: Callable[[], int]) -> int:
    """Returns the exit code of `run`; an error in it goes to stderr and never counts as a claim that fails."""
    try:
        return run()
    except errors.KVGraftError as error:
        return _refuse(name, str(error))
    except ModuleNotFoundError as error:
        return _refuse(name, f"{error}; run: pip install .[weights]")
    except (OSError, MemoryError) as error:
        return _refuse(name, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        progress.say(f"{name}: interrupted")
        return INTERRUPTED
    except endings.Ended as error:
        progress.say(f"{name}: ended by {error.signal.name}")
        return 128 + error.signal
    except Exception:
        progress.say(traceback.format_exc())
        return _refuse(name, "stopped by the error above, which is a mistake in the program")


def execute(
    experiment: Experiment, config: Mapping[str, Any] | None, out: str | os.PathLike[str] | None, mesh: int = 1
) -> int:
    """Checks everything that was asked for, runs, writes the results, prints the table.

    Args:
      experiment: what to run.
      config: the configuration; fields that this experiment does not read are those of another.
      out: folder for the results.
      mesh: devices over which the model is spread.

    Returns:
      The exit code.
    """
    return guard(experiment.name, lambda: _execute(experiment, config, out, mesh))


def read_settings(settings_type: type, config: Mapping[str, Any] | None) -> Any:
    """Reads the fields of a configuration as `settings_type`.

    Raises:
      ConfigError: a field is missing, or is of another type.
    """
    if config is None:
        raise errors.ConfigError("--config: got none, wanted --config=configs/FILE.py")
    values = {}
    hints = typing.get_type_hints(settings_type)
    for field in dataclasses.fields(settings_type):
        if field.name not in config:
            raise errors.ConfigError(f"configuration: has no field {field.name!r}; {settings_type.__name__} needs it")
        value = config[field.name]
        if not _fits(value, hints[field.name]):
            raise errors.ConfigError(f"configuration: {field.name}: got {value!r}, wanted {field.type}")
        values[field.name] = value
    return settings_type(**values)


def report(document: Mapping[str, Any]) -> str:
    """Writes the content of result.json as Markdown; SHA-256 in the rows are cut to their first 16 digits."""
    lines = [f"# {document['experiment']}: {_verdict(document)}", "", f"Claim: {document['claim']}", ""]
    lines += ["## Figures", "", *_markdown(("figure", "value"), _figures(document))]
    for name in _GROUPS:
        lines += [f"## {name.capitalize()}", "", *_markdown((name, "value"), document[name].items())]
    lists = {name: document[name] for name in _LISTS if name in document}  # Older records have no checks.
    for name, rows in {**lists, **document.get("tables", {})}.items():
        if rows:
            cells = ([_shortened(value) for value in row.values()] for row in rows)
            lines += [f"## {name.capitalize()}", "", *_markdown(rows[0].keys(), cells)]
    return "\n".join(lines)


def table(document: Mapping[str, Any]) -> str:
    """Returns the figures in two columns and a line that says PASS or FAIL."""
    lines = columns([(name, _text(value)) for name, value in _figures(document)])
    return "\n".join([document["experiment"], *lines, f"{_verdict(document)}: {document['claim']}"])


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """One indented line per row, its cells padded to the widest of their column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return ["  " + line.rstrip() for line in padded]


def new_folder(out: str | os.PathLike[str] | None) -> pathlib.Path:
    """Returns the folder for results, and makes it if it does not exist.

    Raises:
      InputError: none was named, it cannot be made or used, or something is in it.
    """
    if not out:
        raise errors.InputError("--out: got none, wanted --out=DIR, a new or empty folder")
    folder = paths.absolute(out, "--out")
    paths.check_plain(folder, "--out")  # Artifacts are saved in it.
    if folder.is_dir():
        scratch_lib.sweep(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise errors.InputError(
            f"--out: {folder} exists and is not an empty folder; choose another, nothing was written"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InputError(f"--out: {folder} could not be made: {error}") from None
    return folder


def run_module(module: str, *arguments: str) -> None:
    """Runs a module of the project in a new process, which compiles for itself, and passes on what it says on stderr.

    Raises:
      ConfigError: it ended with another code than 0; the message holds its last line.
    """
    code, said = start_module(module, *arguments, JAX_ENABLE_COMPILATION_CACHE="false")
    if code:
        reason = said.strip().splitlines()[-1:] or ["no message"]
        raise errors.ConfigError(f"the process of {module} ended with {code}: {reason[0]}")


def start_module(module: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Runs a module in a new process with these variables set: its exit code, and the end of what it said on stderr."""
    said = ""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, cwd=_ROOT, env=os.environ | environment, stderr=subprocess.PIPE) as process:
        try:
            while chunk := process.stderr.read1().decode(errors="replace"):
                progress.write(chunk)
                said = (said + chunk)[-4000:]
        except BaseException:
            process.kill()  # Nobody waits for its answer any more.
            raise
    return process.returncode, said


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def _parse(name: str, argv: list[str]) -> list[str]:
    """Parses the flags; whatever is wrong with them, or with the configuration file, exits with REFUSED."""
    for place, argument in enumerate(argv):
        if not argument.startswith("--config="):
            continue
        path, *rest = os.path.expanduser(argument.removeprefix("--config=")).split(":")
        argv[place] = "--config=" + ":".join([path, *rest])
        if not os.path.isfile(path):
            sys.exit(_refuse(name, f"--config: found no file {errors.shown(path)}, wanted one of configs/*.py"))
    try:
        rest = flags.FLAGS(argv)
        config = flags.FLAGS["config"].value if "config" in flags.FLAGS else None
        _ = config is not None and list(config)  # A file that could not be read says so when it is used.
    except AttributeError as error:
        sys.exit(_refuse(name, f"--config: no such field: {error}"))
    except flags.Error as error:
        sys.exit(_refuse(name, str(error)))
    except Exception as error:  # A configuration file is a program and may raise anything.
        sys.exit(_refuse(name, f"{type(error).__name__}: {error}"))
    if len(rest) > 1:
        sys.exit(_refuse(name, f"got the arguments {rest[1:]}, wanted only flags"))
    return rest


def _refuse(name: str, message: str) -> int:
    progress.say(f"{name}: {message}")
    return REFUSED


def _execute(
    experiment: Experiment, config: Mapping[str, Any] | None, out: str | os.PathLike[str] | None, mesh: int
) -> int:
    settings = read_settings(experiment.settings, config)
    devices = kg.make_mesh(mesh)
    existed = bool(out) and paths.absolute(out, "--out").exists()
    folder = new_folder(out)
    began = time.perf_counter()
    try:
        loaded = [kg.load_model(settings.model, settings.dtype, mesh=devices)]
    except errors.KVGraftError:
        if not existed:
            folder.rmdir()  # Nothing is in it.
        raise
    source = loaded[0].source
    findings = experiment.run(settings, loaded.pop(), folder)  # An experiment may free the model, so none is kept here.
    document = _document(experiment, settings, source, findings, time.perf_counter() - began)
    write_text(folder / RESULT, json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_text(folder / REPORT, report(document))
    print(table(document))
    return HOLDS if findings.holds else FAILS


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value is of the type, exactly: no bool for an int, no list for a tuple."""
    if typing.get_origin(hint) is tuple:
        item_hint, _ = typing.get_args(hint)
        return type(value) is tuple and all(_fits(item, item_hint) for item in value)
    return type(value) is hint


def _document(experiment: Experiment, settings: Any, source: str, findings: Findings, seconds: float) -> dict[str, Any]:
    figures = {**findings.figures, "pin_id": findings.pin.id, "seconds": round(seconds, 1)}
    if findings.checks:
        held = sum(check["holds"] for check in findings.checks)
        figures = {"checks_held": held, "checks_failed": len(findings.checks) - held, **figures}
    head = {
        "experiment": experiment.name,
        "claim": experiment.claim,
        "holds": findings.holds,
        "figures": list(figures),
    }
    rest = {
        "config": dataclasses.asdict(settings),
        "source": source,
        "inputs": dict(findings.inputs),
        "outputs": dict(findings.outputs),
        "environment": _environment(),
        "pin": findings.pin.document,
        "checks": [dict(row) for row in findings.checks],
        "tries": [dict(row) for row in findings.tries],
        "rows": [dict(row) for row in findings.rows],
        "tables": {name: [dict(row) for row in rows] for name, rows in findings.tables.items()},
    }
    clash = sorted(findings.figures.keys() & {*head, *rest, *_OWN_FIGURES})
    if clash:
        raise errors.ConfigError(f"figures: {', '.join(clash)}: the result has fields of that name; choose others")
    return {**head, **figures, **rest}


def _environment() -> dict[str, str | int]:
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count() or 0,
        **versions,
    }


def _figures(document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, document[name]) for name in document["figures"]]


def _verdict(document: Mapping[str, Any]) -> str:
    return "PASS" if document["holds"] else "FAIL"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items()) or "none"
    return errors.printable(value) if isinstance(value, str) else json.dumps(value)


def _shortened(value: Any) -> Any:
    return value[:_SHORT_HASH] if isinstance(value, str) and _HASH.fullmatch(value) else value


def _markdown(header: Sequence[str], rows) -> list[str]:
    cells = [[_text(cell).replace("|", "\\|") for cell in row] for row in (tuple(header), *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + " --- |" * len(cells[0]), *lines[1:], ""]
