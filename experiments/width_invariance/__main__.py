"""Runs `python -m experiments.width_invariance`; `experiment` says what it does."""

from experiments import harness
from experiments.width_invariance import experiment

if __name__ == "__main__":
    harness.main(experiment.EXPERIMENT)
