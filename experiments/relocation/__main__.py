"""Runs `python -m experiments.relocation`; `experiment` says what it does."""

from experiments import harness
from experiments.relocation import experiment

if __name__ == "__main__":
    harness.main(experiment.EXPERIMENT)
