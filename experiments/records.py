"""Makes the records under results/ again, one after the other, each only where it is not of today's program.

  bash workspace.sh records [FOLDER ...]

A record is made in a folder beside its place and put there when it is whole, so a run that was broken off goes on where
it stopped. Without names, all are looked at. What a record is of is in `RECORDS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import importlib
import json
import pathlib
import shutil
import sys
from typing import Any

import jax
import ml_collections

from experiments import harness
from kvgraft_jax import errors, progress
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import configurations
from kvgraft_jax.runtime import sampling, step

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"

_MODEL = "gemma-3-270m"


@dataclasses.dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
      folder: its place under results/.
      experiment: name of the experiment.
      config: name of the configuration, a module of configs/.
      changes: fields that are set to other values on the command line.
      flags: further flags.
    """

    folder: str
    experiment: str
    config: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def configuration(self) -> ml_collections.ConfigDict:
        """Returns the configuration with the changes."""
        config = importlib.import_module(f"configs.{self.config}").get_config()
        config.update(self.changes)
        return config

    @property
    def arguments(self) -> list[str]:
        """Returns the arguments of the experiment's command, but for the output folder."""
        changes = [f"--config.{name}={value}" for name, value in self.changes.items()]
        return [f"--config=configs/{self.config}.py", *changes, *self.flags]


RECORDS = (
    Record("cpu/graft_bf16", "graft_exactness", "exactness_270m"),
    Record("cpu/graft_f32", "graft_exactness", "exactness_270m", {"dtype": "float32"}),
    Record("cpu/schedules_bf16", "schedule_invariance", "exactness_270m"),
    Record("cpu/schedules_f32", "schedule_invariance", "exactness_270m", {"dtype": "float32", "schedules": 50}),
    Record("cpu/widths_bf16", "width_invariance", "exactness_270m"),
    Record("cpu/widths_f32", "width_invariance", "exactness_270m", {"dtype": "float32"}),
    Record("cpu/batches_bf16", "batch_invariance", "exactness_270m"),
    Record("rotary/relocation", "relocation", "relocation_270m"),
    Record("rotary/emitted_keys", "emitted_keys", "emitted_keys_270m"),
    Record("rotary", "rotary_exactness", "rotary_exactness"),
    Record("cpu/bench", "bench", "bench_270m", flags=("--peers",)),
)


def read(record: Record) -> dict[str, Any] | None:
    """Returns the result of a record; None where there is none."""
    path = RESULTS / record.folder / harness.RESULT
    return json.loads(path.read_text()) if path.is_file() else None


def is_current(record: Record, document: Mapping[str, Any]) -> bool:
    """Returns whether a result is of today's configuration and programs.

    Raises:
      ConfigError: it was made with another version of jax, whose programs have another text.
    """
    pin = document["pin"]
    today = json.loads(json.dumps(record.configuration.to_dict()))
    if pin["schema"] != pin_lib.SCHEMA or document["config"] != {name: today.get(name) for name in document["config"]}:
        return False
    if pin["jax"] != jax.__version__:
        raise errors.ConfigError(
            f"results/{record.folder}: made with jax {pin['jax']}, this is {jax.__version__}, whose programs have "
            "another text; run this with that version"
        )
    if pin["model"] != json.loads(json.dumps(configurations.get(_MODEL).document())):
        return True  # Of a model of its own, cut for the experiment.
    return pin["program"] == _programs(pin["dtype"], pin["kv_block"], pin.get("width"))


def make(record: Record) -> int:
    """Makes a record; returns the exit code of its experiment. Its place changes only when the new one is whole."""
    new, place = ROOT / "out" / "records" / record.folder, RESULTS / record.folder
    shutil.rmtree(new, ignore_errors=True)
    code, _ = harness.start_module(f"experiments.{record.experiment}", *record.arguments, f"--out={new}")
    if not (new / harness.RESULT).is_file():
        return code
    place.mkdir(parents=True, exist_ok=True)
    for path in sorted(new.iterdir(), key=lambda path: path.name == harness.RESULT):
        shutil.move(path, place / path.name)  # The result itself comes last: with it, the record is new.
    return code


def main(names: Sequence[str]) -> int:
    """Makes the named records, or all, that are not current; returns 0 if all experiments held."""
    unknown = sorted(set(names) - {record.folder for record in RECORDS})
    if unknown:
        raise errors.ConfigError(
            f"records: got {', '.join(unknown)}, wanted some of {', '.join(record.folder for record in RECORDS)}"
        )
    wanted, failed = [record for record in RECORDS if not names or record.folder in names], []
    for number, record in enumerate(wanted, 1):
        document = read(record)
        if document is not None and is_current(record, document):
            state = "is of today's program" + ("" if document["holds"] else ", and its claim did not hold")
            progress.say(f"records {number} of {len(wanted)}: {record.folder} {state}")
            if not document["holds"]:
                failed.append(record.folder)
            continue
        progress.say(f"records {number} of {len(wanted)}: {record.folder}: experiments.{record.experiment}")
        if make(record):
            failed.append(record.folder)
    if failed:
        progress.say(f"records: did not hold, or could not run: {', '.join(failed)}")
    return harness.FAILS if failed else harness.HOLDS


@functools.lru_cache(maxsize=4)
def _programs(dtype: str, kv_block: int, width: int | None) -> dict[str, str]:
    model = configurations.get(_MODEL)
    config = step.StepConfig(model, dtype, kv_block, width=width)
    return {**step.programs(config).fingerprint, "draw": sampling.fingerprint(model.vocab_size)}


if __name__ == "__main__":
    sys.exit(harness.guard("records", lambda: main(sys.argv[1:])))
