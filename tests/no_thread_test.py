"""Leaves out the thread test in a process that imports this first, as conftest does in the suite's own processes."""

from kvgraft_jax import thread_test

thread_test.check = lambda config, device: None
