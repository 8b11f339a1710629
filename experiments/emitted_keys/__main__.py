"""Runs `python -m experiments.emitted_keys`; `experiment` says what it does."""

from experiments import harness
from experiments.emitted_keys import experiment

if __name__ == "__main__":
    harness.main(experiment.EXPERIMENT)
