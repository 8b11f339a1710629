"""Runs `python -m experiments.make_certificate`; `generator` says what it does."""

from experiments.make_certificate import generator

if __name__ == "__main__":
    generator.main()
