"""Runs `python -m experiments.schedule_invariance`; `experiment` says what it does."""

from experiments import harness
from experiments.schedule_invariance import experiment

if __name__ == "__main__":
    harness.main(experiment.EXPERIMENT)
