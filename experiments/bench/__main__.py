"""Runs `python -m experiments.bench`; `experiment` says what it does."""

from experiments import harness
from experiments.bench import experiment

if __name__ == "__main__":
    harness.main(experiment.EXPERIMENT)
