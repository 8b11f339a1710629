"""Runs `python -m experiments.demo`; `demonstration` says what it does."""

from experiments.demo import demonstration

if __name__ == "__main__":
    demonstration.main()
