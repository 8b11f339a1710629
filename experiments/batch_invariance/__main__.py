"""Runs `python -m experiments.batch_invariance`; `experiment` says what it does."""

from experiments import harness
from experiments.batch_invariance import experiment

if __name__ == "__main__":
    harness.main(experiment.EXPERIMENT)
