"""The engine: a model, its step in a few widths and a capacity; contexts are values that go in and come out.

Importing this module sets the XLA flags that exactness needs, so import it before jax starts a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools

import flax
import jax
import numpy as np

from kvgraft_jax import determinism, device_memory, errors, host_memory, progress, self_test, width_probe
from kvgraft_jax import identity as identity_lib
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import capture as capture_lib
from kvgraft_jax.grafting import graft as graft_lib
from kvgraft_jax.grafting import manifest
from kvgraft_jax.grafting import verify as verify_lib
from kvgraft_jax.runtime import batch as batch_lib
from kvgraft_jax.runtime import contexts as contexts_lib
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.runtime import plans
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import sampling as sampling_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import step as step_lib

determinism.configure()

DEFAULT_SHAPES = {"cpu": (2, 10, 32, 256)}
ONE_SHAPE = (64,)
"""Of platforms on which the bits of XLA's own products depend on the width: all steps are of this one."""
DEFAULT_ROWS = 16
DEFAULT_KV_BLOCK = 128

_TRIM_TOKENS = 160  # A trim takes some 20 ms, which is small beside a prefill of this length.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Engine:
    """Runs one model through one step, compiled for a few widths.

    The constructor makes the tables. Programs are compiled when they are first used, or by `warm_up`. Before a program
    gives a first result, the self-test runs it (`kvgraft_jax.self_test`), once per process.

    Attributes:
      model: what `load_model` returned.
      capacity: tokens that a context can hold; rounded up to whole K/V blocks. Beyond the positions for which the model
        was trained it warns once (`KVGraftWarning`).
      shapes: widths of steps, in lanes, in rising order; None for the platform's own. Each step takes the one that fits
        what is left to read. Bits do not depend on them. Where a machine breaks that (`width_probe`), the engine warns
        and uses one width, which is then in the pin.
      width: another way to write shapes=(width,).
      rows: sequences that run at once in `prefill_many`, `extend_many` and `generate_many`; the others wait.
      kv_block: slots per attention block. Part of the pin.
      step_config: what the programs are built from.
      runner: the programs with parameters and rotary tables, for experiments that drive the step themselves.

    Raises:
      ConfigError: sizes that make no sense.
      InputError: not a Model.
      ResourceError: the device has no memory for the tables and one cache; raised before they are allocated.
      DeterminismError: XLA does not run in the exact configuration.
    """

    model: model_lib.Model
    _: dataclasses.KW_ONLY
    capacity: int = 4096
    shapes: tuple[int, ...] | None = None
    width: int | None = None
    rows: int = DEFAULT_ROWS
    kv_block: int = DEFAULT_KV_BLOCK
    step_config: step_lib.StepConfig = dataclasses.field(init=False)
    runner: run_lib.Runner = dataclasses.field(init=False)

    def __post_init__(self):
        model, capacity, kv_block = self.model, self.capacity, self.kv_block
        plans.plan_sizes(capacity, kv_block, self.rows)
        shapes = plans.plan_shapes(self.shapes, self.width)
        if not isinstance(model, model_lib.Model):
            raise errors.InputError(f"model: {errors.mistaken(model, 'Model')}")
        config = step_lib.StepConfig(model.config, model.dtype, kv_block, model.mesh)
        determinism.assert_in_force()
        device, *_ = sharding_lib.devices(model.mesh)
        capacity = config.num_blocks(capacity) * kv_block
        needed = rotary.tables_bytes(model.config, capacity, config.jnp_dtype)
        needed += cache_lib.device_bytes(model.config, capacity // kv_block, kv_block, config.jnp_dtype, model.mesh)
        purpose = f"a cache of {capacity} tokens and its rotary tables"
        device_memory.check(model.config.name, needed, sharding_lib.devices(model.mesh), purpose, "a smaller capacity")
        plans.warn_beyond(model.config.name, self.capacity, model.config.max_positions)
        config, shapes = width_probe.settle(config, device, shapes or DEFAULT_SHAPES.get(device.platform, ONE_SHAPE))
        tables = rotary.make_tables(model.config, capacity, config.jnp_dtype, model.mesh)
        # A plain dict of dicts is the tree that jit takes apart fastest; nobody else holds this one.
        params = flax.core.unfreeze(model.params)
        prepare = functools.partial(self_test.prepare, weights=model.digest)
        runner = run_lib.Runner(step_lib.programs(config), params, tables, shapes, prepare)
        identity = identity_lib.Identity(model, runner, device)
        contexts = contexts_lib.Contexts(model, runner, capacity, self.rows)
        settled = {"capacity": capacity, "shapes": shapes, "step_config": config, "runner": runner}
        for name, value in {**settled, "_contexts": contexts, "_identity": identity}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        config = self.step_config
        shape = f"capacity={self.capacity}, shapes={self.shapes}, kv_block={config.kv_block}"
        return f"Engine({config.model.name}, {config.dtype}, {shape})"

    @property
    def pin(self) -> pin_lib.Pin:
        """Returns the document of everything that decides the bits; equal for every engine of equal settings.

        Raises:
          DeterminismError: options of jax were changed after the engine compiled its programs; or the self-test failed.
        """
        return self._identity.pin

    def warm_up(self) -> None:
        """Compiles step, head and draw for every width, for one sequence and for many; shows progress on stderr.

        Each step is tested, too. Without this, a program is compiled when it is first needed.
        """
        self._identity.check()
        sizes = [(width, many) for many in (False, True) for width in self.shapes]
        for width, many in progress.each(sizes, description="compiling", unit="program"):
            self.runner.prepare(self.runner, width, self._contexts.num_blocks(many), self.rows if many else 1)
            if many:  # Which covers the heads of one sequence.
                self.runner.compile_heads(width, self.rows)
        logits_V = jax.device_put(np.zeros(self.model.config.vocab_size, np.float32), self.runner.place)
        sampling_lib.draw(logits_V, 0, sampling_lib.Sampling())

    def prefill(self, token_ids: Sequence[int], *, progress: bool = False) -> state_lib.State:
        """Reads `token_ids` into a fresh context.

        Args:
          token_ids: one or more ids.
          progress: shows a bar on stderr.

        Raises:
          InputError: empty, or an id outside the vocabulary.
          CapacityError, ResourceError: more tokens than slots, or than memory holds; before any compute.
        """
        determinism.check_options()
        job = self._contexts.reading(token_ids)
        ((_, state),) = self._run([job], progress=progress)
        if len(job.token_ids) > _TRIM_TOKENS:
            state.logits.block_until_ready()
            host_memory.trim()
        return state

    def prefill_many(
        self, token_ids: Sequence[Sequence[int]], *, on_error: str = plans.RAISE, progress: bool = False
    ) -> list[state_lib.State | errors.KVGraftError]:
        """Reads several texts into contexts of their own, many at a time.

        Exact: bit-exact: each context is the one that `prefill` gives.

        Args:
          token_ids: the ids of each text.
          on_error: "raise" raises one error that names every text that cannot be read, before any compute; "return"
            reads the others, and the list that comes back holds an error instead of a context for such a text.
          progress: shows a bar on stderr.

        Returns:
          A context for each text, in their order.

        Raises:
          BatchError: texts that `prefill` would refuse.
          ResourceError: no memory for all contexts; before any compute.
        """
        determinism.check_options()
        items = plans.plan_texts(token_ids)
        planned = plans.plan_each(items, self._contexts.reading, on_error)
        done = self._run(planned, many=True, progress=progress)
        return [one if isinstance(one, errors.KVGraftError) else one[1] for one in done]

    def extend(self, state: state_lib.State, token_ids: Sequence[int], *, progress: bool = False) -> state_lib.State:
        """Reads `token_ids` after those of `state`, which stays as it is, and returns the new context.

        Raises:
          InputError: empty, an id outside the vocabulary, or a state of another engine.
          CapacityError, ResourceError: as `prefill`.
        """
        determinism.check_options()
        ((_, after),) = self._run([self._contexts.reading_after(state, token_ids)], progress=progress)
        return after

    def extend_many(
        self,
        states: Sequence[state_lib.State],
        token_ids: Sequence[Sequence[int]],
        *,
        on_error: str = plans.RAISE,
        progress: bool = False,
    ) -> list[state_lib.State | errors.KVGraftError]:
        """Reads tokens after those of each state, many at a time. States that share a prefix share its blocks.

        Exact: bit-exact: each context is the one that `extend` gives.

        Args:
          states: contexts, which stay as they are. The list may hold the same context several times.
          token_ids: what to read after each of them.
          on_error, progress: as for `prefill_many`.

        Raises:
          BatchError, ResourceError: as `prefill_many`.
          InputError: lists of two lengths.
        """
        determinism.check_options()
        pairs = plans.plan_pairs(("states", states), ("token_ids", token_ids))
        planned = plans.plan_each(pairs, lambda pair: self._contexts.reading_after(*pair), on_error)
        done = self._run(planned, many=True, progress=progress)
        return [one if isinstance(one, errors.KVGraftError) else one[1] for one in done]

    def generate(
        self,
        state: state_lib.State,
        *,
        max_new_tokens: int = 32,
        stop_ids: Sequence[int] | None = None,
        sampling: sampling_lib.Sampling | None = None,
        on_token: Callable[[int, jax.Array], None] | None = None,
    ) -> tuple[list[int], state_lib.State]:
        """Decodes greedily, the token of the largest logit and the lowest id on a tie, or by sampling.

        Tokens that the model suppresses, and rows of the vocabulary without a piece in the tokenizer, are never chosen.

        Args:
          state: where to begin; stays as it is.
          max_new_tokens: the most tokens to decode.
          stop_ids: end before any of these; None means `model.stop_ids`, () none.
          sampling: how to draw; None is greedy. A draw depends only on its seed and the position of the new token.
          on_token: called with each new token and the float32 [V] logits that follow it.

        Returns:
          The new tokens, a stop token not among them, and the context that has read them.

        Raises:
          CapacityError, ResourceError: `max_new_tokens` do not fit; before any compute.
          InputError: a number, state, sampling, callback or stop tokens that cannot be used; before any compute.
          WeightsError: the model's logits are NaN.
        """
        determinism.check_options()
        plans.plan_callback(on_token, "token, logits_V")
        job = self._contexts.decoding(state, self._contexts.ends(max_new_tokens, stop_ids), sampling)
        told = None if on_token is None else lambda _, token_id, logits_V: on_token(token_id, logits_V)
        ((new_tokens, after),) = self._run([job], on_token=told)
        return new_tokens, after

    def generate_many(
        self,
        states: Sequence[state_lib.State],
        *,
        max_new_tokens: int = 32,
        stop_ids: Sequence[int] | None = None,
        sampling: sampling_lib.Sampling | Sequence[sampling_lib.Sampling | None] | None = None,
        on_token: Callable[[int, int, jax.Array], None] | None = None,
        on_error: str = plans.RAISE,
        progress: bool = False,
    ) -> list[tuple[list[int], state_lib.State] | errors.KVGraftError]:
        """Decodes from several states, up to `rows` of them at a time; the next one begins when another has ended.

        An exception from `on_token`, or an interrupt, ends the call, and its results are lost. The states that were
        given stay whole.

        Exact: bit-exact: tokens and context are those that `generate` gives for each state by itself.

        Args:
          states: contexts, which stay as they are. The list may hold the same context several times; give each of
            those a seed of its own, or they draw the same tokens.
          max_new_tokens, stop_ids: as for `generate`, of every state.
          sampling: one for all, or a list with one for each state.
          on_token: called with the index of the state, the new token and the float32 [V] logits that follow it.
          on_error, progress: as for `prefill_many`.

        Returns:
          The new tokens and the context of each state, in their order.

        Raises:
          BatchError, ResourceError: as `prefill_many`.
          InputError: a list of samplings of another length, or a callback that cannot be called.
          WeightsError: the model's logits are NaN.
        """
        determinism.check_options()
        plans.plan_callback(on_token, "index, token, logits_V")
        states = plans.plan_list("states", states)
        ends = self._contexts.ends(max_new_tokens, stop_ids)
        pairs = list(zip(states, plans.plan_samplings(sampling, len(states)), strict=True))
        planned = plans.plan_each(pairs, lambda pair: self._contexts.decoding(pair[0], ends, pair[1]), on_error)
        return self._run(planned, many=True, progress=progress, on_token=on_token)

    def score(self, token_ids: Sequence[int], *, progress: bool = False) -> np.ndarray:
        """Computes next-token logits at every position of a fresh context: float32 [T, V] on the host.

        The result takes 4 V bytes a token.

        Exact: row t is bit-equal to the logits after a prefill of tokens 0..t, as long as all values are finite.

        Raises:
          InputError, CapacityError, ResourceError: as `prefill`.
        """
        determinism.check_options()
        job = self._contexts.reading(token_ids)
        self._contexts.check_memory([job], many=False)
        self._identity.check()
        cache = self.step_config.make_cache(self._contexts.num_blocks(False))
        return run_lib.score(self.runner, cache, job.token_ids, progress=progress)

    def capture(
        self,
        state: state_lib.State,
        *,
        provenance: Mapping[str, str | int] | None = None,
        policy: str = manifest.VISIBLE_ROWS,
    ) -> artifact_lib.Artifact:
        """Captures a state as an artifact on the host.

        Args:
          state: made by this engine or one of equal pin.
          provenance: flat notes: who, why, digest of the source.
          policy: "visible" keeps the rows that a next token can see, "full" every row.

        Raises:
          CaptureError: a row or logit is NaN or infinite, or the state descends from an inexact graft.
          ConfigError: unknown policy.
          WindowError: "full" of a state whose older sliding rows were never restored.
          InputError: provenance that is not flat.
        """
        self._contexts.check_state(state)
        return capture_lib.capture(state, self.pin, provenance or {}, policy=policy)

    def graft(
        self, artifact: artifact_lib.Artifact, *, position: int = 0, allow_inexact: bool = False
    ) -> state_lib.State:
        """Puts the artifact's rows at their own positions in a fresh context, as if it had just read the text.

        Exact: bit-exact: K/V rows and logits equal those of the state that was captured, which are finite values.

        Args:
          artifact: what `capture` or `load_artifact` returned.
          position: its own, 0; another one is refused.
          allow_inexact: accept an artifact of another machine or program (device, software), though never of
            another model; the state is then labelled `exact=False` and cannot be captured.

        Raises:
          PinMismatch: made under another pin; names every field that differs.
          InputError: a position other than the artifact's own.
          CapacityError, IntegrityError, WindowError: see `grafting.graft.plan_graft`.
        """
        determinism.check_options()
        exact = graft_lib.plan_graft(
            artifact, self.pin, self.step_config, self.capacity, position=position, allow_inexact=allow_inexact
        )
        return graft_lib.graft(artifact, self.step_config, self.model.digest, exact=exact)

    def verify(self, artifact: artifact_lib.Artifact) -> verify_lib.Verification:
        """Reads an artifact's tokens again and compares every row and logit with what it holds.

        A pin is what the depositor says, and a digest only shows that the bytes are those of the deposit. This computes
        them anew: it costs as much as reading the text.

        Exact: equal exactly if the rows and logits are those that this engine computes, which are finite values.

        Returns:
          Whether they are equal, else where they differ first: layer, key or value, and position; or a logit.

        Raises:
          PinMismatch, CapacityError, IntegrityError, WindowError, InputError: as `graft`.
          ResourceError: as `prefill`.
        """
        determinism.check_options()
        graft_lib.plan_graft(artifact, self.pin, self.step_config, self.capacity)
        return verify_lib.verify(artifact, self.prefill(artifact.token_ids))

    def _run(
        self,
        planned: list[batch_lib.Job | errors.KVGraftError],
        *,
        many: bool = False,
        progress: bool = False,
        on_token: Callable[[int, int, jax.Array], None] | None = None,
    ) -> list[tuple[list[int], state_lib.State] | errors.KVGraftError]:
        """Runs planned jobs once memory and programs are in order; errors in the list stay in their places."""
        jobs = [one for one in planned if isinstance(one, batch_lib.Job)]
        if not jobs:
            return list(planned)
        self._contexts.check_memory(jobs, many=many)
        self._identity.check()
        return self._contexts.run(planned, many=many, progress=progress, on_token=on_token)
