"""Runs `python -m experiments.rotary_exactness`; `experiment` says what it does."""

from experiments import harness
from experiments.rotary_exactness import experiment

if __name__ == "__main__":
    harness.main(experiment.EXPERIMENT)
