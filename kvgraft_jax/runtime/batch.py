"""Many sequences in one step: who reads or decodes in which lanes, until all are done.

A sequence that waits is admitted as soon as a row is free and its blocks fit. Sequences that decode take a lane each;
what is left of the step goes to prompts, in the order in which they came.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import dataclasses

import jax

from kvgraft_jax import progress as progress_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import step as step_lib
from kvgraft_jax.runtime import workspace as workspace_lib


@dataclasses.dataclass(frozen=True)
class Ends:
    """Where decoding ends.

    Attributes:
      max_new_tokens: the most tokens to decode.
      stop_ids: decoding ends before any of these.
    """

    max_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What one sequence is to do: read tokens after those of a context, then decode.

    Attributes:
      state: the context; None for a fresh one, which then reads at least one token.
      token_ids: to read.
      ends: where decoding ends, at once by default.
      choose: from logits and the position of the new token to its id; None without decoding.
    """

    state: state_lib.State | None
    token_ids: tuple[int, ...] = ()
    ends: Ends = Ends()
    choose: Callable[[jax.Array, int], int] | None = None

    @property
    def start(self) -> int:
        """Position of the first new token."""
        return self.state.length if self.state else 0

    @property
    def most_tokens(self) -> int:
        """Returns the most tokens that the context holds in the end."""
        return self.start + len(self.token_ids) + self.ends.max_new_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Done:
    """What a sequence left.

    Attributes:
      new_tokens: decoded, a stop token not among them.
      blocks: of the whole context.
      logits_V: float32 [V], of the token after the last.
    """

    new_tokens: tuple[int, ...]
    blocks: tuple[cache_lib.CacheBlock, ...]
    logits_V: jax.Array


class _Sequence:
    """A job under way."""

    def __init__(self, number: int, job: Job, kv_block: int):
        self.number, self.job = number, job
        self.num_shared = job.start // kv_block
        self.table: list[int] = []
        self.row = -1
        self.position = job.start
        self.pending = list(job.token_ids)
        self.new_tokens: list[int] = []
        self.logits_V = job.state.logits if job.state else None
        self.served_at = 0

    def choose(self) -> bool:
        """Chooses the next token where one is due; returns whether the sequence has anything left to read."""
        if not self.pending and len(self.new_tokens) < self.job.ends.max_new_tokens:
            token_id = self.job.choose(self.logits_V, self.position)
            if token_id not in self.job.ends.stop_ids:
                self.pending.append(token_id)
        return bool(self.pending)

    @property
    def is_decoding(self) -> bool:
        """Returns whether the tokens of the job have been read, so that what is pending was chosen here."""
        return self.position >= self.job.start + len(self.job.token_ids)


def run(
    runner: run_lib.Runner,
    workspace: workspace_lib.Workspace,
    jobs: Sequence[Job],
    *,
    num_rows: int = 1,
    progress: bool = False,
    on_token: Callable[[int, int, jax.Array], None] | None = None,
) -> list[Done]:
    """Carries out all jobs, at most `num_rows` at a time.

    Exact: bit-exact: every job leaves the rows, tokens and logits that it leaves alone, for finite values.

    Args:
      runner: programs and parameters.
      workspace: with space for the longest job.
      jobs: planned, each of which fits.
      num_rows: rows of the table.
      progress: shows a bar of tokens on stderr.
      on_token: called with the number of the job, each new token and the float32 [V] logits that follow it.

    Returns:
      What each job left, in their order.
    """
    return _Batch(runner, workspace, jobs, num_rows, on_token).run(progress)


class _Batch:
    """The jobs of one call."""

    def __init__(self, runner, workspace, jobs, num_rows, on_token):
        self._runner, self._workspace, self._on_token = runner, workspace, on_token
        self._config = runner.programs.config
        kv_block = self._config.kv_block
        self._waiting = collections.deque(_Sequence(number, job, kv_block) for number, job in enumerate(jobs))
        self._active: list[_Sequence] = []
        self._free_rows = list(range(num_rows))
        self._num_rows = num_rows
        self._done: list[Done | None] = [None] * len(jobs)
        self._num_steps = 0

    def run(self, progress: bool) -> list[Done]:
        """Runs steps until every job is done."""
        total = sum(len(sequence.job.token_ids) + sequence.job.ends.max_new_tokens for sequence in self._waiting)
        with progress_lib.bar(total, unit="tok", stays=False, is_shown=progress) as bar:
            while self._waiting or self._active:
                self._admit()
                if self._active:
                    bar.update(self._step())
        return self._done

    def _admit(self) -> None:
        while self._waiting and self._free_rows:
            sequence = self._waiting[0]
            if not sequence.choose():  # Nothing to compute: the context stays as it is.
                self._done[sequence.number] = Done((), sequence.job.state.blocks, sequence.logits_V)
                self._waiting.popleft()
                continue
            blocks = sequence.job.state.blocks if sequence.job.state else ()
            num_blocks = self._config.num_blocks(sequence.job.most_tokens)
            table = self._workspace.admit(blocks, sequence.num_shared, num_blocks)
            if table is None:
                return
            sequence.table, sequence.row = table, self._free_rows.pop(0)
            self._active.append(self._waiting.popleft())

    def _step(self) -> int:
        """Runs one step; returns how many tokens it read."""
        self._num_steps += 1
        width = step_lib.choose_width(self._runner.shapes, sum(len(sequence.pending) for sequence in self._active))
        order = sorted(self._active, key=self._turn)
        served, pieces, room = [], [], width
        for sequence in order:
            tokens = tuple(sequence.pending[:room])
            if tokens:
                served.append(sequence)
                pieces.append(step_lib.Piece(sequence.row, sequence.position, tokens))
                sequence.served_at = self._num_steps
                room -= len(tokens)
        result = self._runner.step(self._workspace.cache, pieces, self._table(), width)
        self._workspace.cache = result.cache
        self._read(served, pieces, result.hidden_TxD)
        return width - room

    def _turn(self, sequence: _Sequence) -> tuple[bool, int]:
        """Returns what puts single tokens first, of the sequence that has waited longest, then prompts as they came."""
        many = len(sequence.pending) > 1
        return many, sequence.number if many else sequence.served_at

    def _read(self, served: list[_Sequence], pieces: list[step_lib.Piece], hidden_TxD: jax.Array) -> None:
        """Moves the sequences on by what a step read; those that have read all get logits, and go on or end."""
        lane, ready, lanes = -1, [], []
        for sequence, piece in zip(served, pieces, strict=True):
            lane += len(piece.tokens)
            if sequence.is_decoding:
                sequence.new_tokens.extend(piece.tokens)
            sequence.position += len(piece.tokens)
            del sequence.pending[: len(piece.tokens)]
            if not sequence.pending:
                ready.append(sequence)
                lanes.append(lane)
        for sequence, logits_V in zip(ready, self._runner.heads(hidden_TxD, lanes), strict=True):
            sequence.logits_V = logits_V
            if sequence.new_tokens and self._on_token is not None:
                self._on_token(sequence.number, sequence.new_tokens[-1], logits_V)
            if not sequence.choose():
                self._finish(sequence)

    def _finish(self, sequence: _Sequence) -> None:
        job, workspace = sequence.job, self._workspace
        shared = job.state.blocks[: sequence.num_shared] if job.state else ()
        stop = self._config.num_blocks(sequence.position)
        taken = tuple(workspace.take(place) for place in sequence.table[sequence.num_shared : stop])
        workspace.release(sequence.table)
        self._active.remove(sequence)
        self._free_rows.append(sequence.row)
        self._done[sequence.number] = Done(tuple(sequence.new_tokens), (*shared, *taken), sequence.logits_V)

    def _table(self) -> list[list[int]]:
        table = [[0] * self._workspace.blocks_per_row for _ in range(self._num_rows)]
        for sequence in self._active:
            table[sequence.row][: len(sequence.table)] = sequence.table
        return table
