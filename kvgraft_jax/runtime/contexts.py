"""Carrying out what callers ask of contexts: plan every sequence, then run them together in a workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses

import jax

from kvgraft_jax import device_memory, errors
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import sharding
from kvgraft_jax.runtime import batch as batch_lib
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.runtime import plans
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import sampling as sampling_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import workspace as workspace_lib

_SHARED_CAPACITIES = 4  # Sequences that run together share a cache of at most this number of capacities.


class Contexts:
    """Makes the contexts of one engine. Two threads may do so at once, each in a workspace of its own.

    Attributes:
      capacity: tokens that a context can hold, whole blocks.
      num_rows: sequences that run at once.
    """

    def __init__(self, model: model_lib.Model, runner: run_lib.Runner, capacity: int, num_rows: int):
        self.capacity, self.num_rows = capacity, num_rows
        self._model, self._runner, self._config = model, runner, runner.programs.config
        self._idle: dict[bool, list[workspace_lib.Workspace]] = {False: [], True: []}

    def num_blocks(self, many: bool) -> int:
        """Returns the number of blocks of a workspace for one sequence or for many."""
        return self._config.num_blocks(self.capacity) * (min(self.num_rows, _SHARED_CAPACITIES) if many else 1)

    def reading(self, token_ids: Sequence[int]) -> batch_lib.Job:
        """Plans what reads tokens into a fresh context; raises as `reading_after`."""
        return self._reading(None, token_ids)

    def reading_after(self, state: state_lib.State, token_ids: Sequence[int]) -> batch_lib.Job:
        """Plans what reads tokens after a state.

        Raises:
          InputError: empty, an id outside the vocabulary, or a state of another engine.
          CapacityError: more tokens than slots.
        """
        self.check_state(state)
        return self._reading(state, token_ids)

    def _reading(self, state: state_lib.State | None, token_ids: Sequence[int]) -> batch_lib.Job:
        planned = run_lib.plan_tokens(token_ids, self._model.config.vocab_size)
        run_lib.plan_capacity(state.length if state else 0, len(planned), self.capacity, "new")
        return batch_lib.Job(state, planned)

    def ends(self, max_new_tokens: int, stop_ids: Sequence[int] | None) -> batch_lib.Ends:
        """Plans where decoding ends.

        Raises:
          InputError: a number or stop tokens that cannot be used.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise errors.InputError(f"max_new_tokens: got {errors.shown(max_new_tokens)}, wanted an int, 0 or more")
        stops = self._model.stop_ids
        if stop_ids is not None:
            stops = run_lib.plan_stops(stop_ids, self._model.config.vocab_size)
        return batch_lib.Ends(max_new_tokens, frozenset(stops))

    def decoding(
        self, state: state_lib.State, ends: batch_lib.Ends, sampling: sampling_lib.Sampling | None
    ) -> batch_lib.Job:
        """Plans what decodes after a state.

        Raises:
          InputError: a state or sampling that cannot be used.
          CapacityError: the most tokens do not fit.
        """
        self.check_state(state)
        run_lib.plan_capacity(state.length, ends.max_new_tokens, self.capacity, "to decode")
        return batch_lib.Job(state, (), ends, plans.plan_choice(self._model, sampling))

    def check_state(self, state: state_lib.State) -> None:
        """Raises `InputError` unless a state was made by the same programs and weights."""
        plans.plan_state(state, self._config, self._model.digest)

    def check_memory(self, jobs: Sequence[batch_lib.Job], *, many: bool) -> None:
        """Raises `ResourceError` where the contexts that come out, and the workspace, do not fit into memory."""
        config = self._config
        new = sum(config.num_blocks(job.most_tokens) - job.start // config.kv_block for job in jobs)
        if not self._idle[many]:
            new += self.num_blocks(many)
        needed = cache_lib.device_bytes(config.model, new, config.kv_block, config.jnp_dtype, config.mesh)
        purpose = f"the contexts of {len(jobs)} sequences" if many else "the context"
        remedy = "fewer sequences at a time" if many else "a smaller capacity, or a shorter text"
        device_memory.check(config.model.name, needed, sharding.devices(config.mesh), purpose, remedy)

    def run(
        self,
        planned: Sequence[batch_lib.Job | errors.KVGraftError],
        *,
        many: bool,
        progress: bool,
        on_token: Callable[[int, int, jax.Array], None] | None = None,
    ) -> list[tuple[list[int], state_lib.State] | errors.KVGraftError]:
        """Runs planned jobs, one or many at a time: the new tokens of each, and the context that it leaves.

        The errors of those that could not be planned stay in their places.
        """
        places = [place for place, one in enumerate(planned) if isinstance(one, batch_lib.Job)]
        jobs, found = [planned[place] for place in places], list(planned)
        told = None if on_token is None else lambda number, *rest: on_token(places[number], *rest)
        with self._workspace(many) as workspace:
            num_rows = self.num_rows if many else 1
            done = batch_lib.run(self._runner, workspace, jobs, num_rows=num_rows, progress=progress, on_token=told)
        for place, job, one in zip(places, jobs, done, strict=True):
            found[place] = list(one.new_tokens), self._state(job, one)
        return found

    def _state(self, job: batch_lib.Job, done: batch_lib.Done) -> state_lib.State:
        if job.state is None:
            return state_lib.State(done.blocks, job.token_ids, done.logits_V, self._config, self._model.digest)
        token_ids = job.state.token_ids + job.token_ids + done.new_tokens
        return dataclasses.replace(job.state, blocks=done.blocks, token_ids=token_ids, logits=done.logits_V)

    @contextlib.contextmanager
    def _workspace(self, many: bool) -> Iterator[workspace_lib.Workspace]:
        """Lends a workspace to one call. A call that fails does not give it back; the next one makes another."""
        try:
            workspace = self._idle[many].pop()
        except IndexError:
            per_row = self._config.num_blocks(self.capacity)
            workspace = workspace_lib.Workspace(self._config, self.num_blocks(many), per_row)
        yield workspace
        self._idle[many][:] = [workspace]
