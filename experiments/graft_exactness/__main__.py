"""Runs `python -m experiments.graft_exactness`; `experiment` says what it does."""

import pathlib
import sys

from experiments import harness
from experiments.graft_exactness import experiment

if __name__ == "__main__":
    if sys.argv[1:2] == [experiment.RECIPIENT]:
        sys.exit(harness.guard("recipient", lambda: experiment.recipient(pathlib.Path(sys.argv[2]))))
    harness.main(experiment.EXPERIMENT)
