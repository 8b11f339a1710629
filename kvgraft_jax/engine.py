"""The engine: a model, one step program and a capacity; contexts are values that go in and come out.

Importing this module sets the XLA flags that exactness needs, so import it before jax starts a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any
import warnings

import flax
import jax
import numpy as np

from kvgraft_jax import determinism, device_memory, errors, host_memory, self_test, thread_test
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import cache as cache_lib
from kvgraft_jax.gemma import rotary
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import capture as capture_lib
from kvgraft_jax.grafting import graft as graft_lib
from kvgraft_jax.grafting import manifest
from kvgraft_jax.grafting import verify as verify_lib
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import state as state_lib
from kvgraft_jax.runtime import step as step_lib

determinism.configure()

DEFAULT_WIDTH = 10
DEFAULT_KV_BLOCK = 128

_TRIM_STEPS = 16  # A trim takes some 20 ms, which is small beside this number of steps.


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Engine:
    """Runs one model through one program of fixed width.

    The constructor makes the tables. Before it returns a first result or its pin, an engine compiles its programs and
    runs the self-test on them (`kvgraft_jax.self_test`), once per process.

    Attributes:
      model: what `load_model` returned.
      capacity: tokens that a context can hold; rounded up to whole K/V blocks. Beyond the positions for which the model
        was trained it warns once (`KVGraftWarning`).
      width: W, lanes of the step. Wider steps read prompts faster and decode slower. Part of the pin.
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
    width: int = DEFAULT_WIDTH
    kv_block: int = DEFAULT_KV_BLOCK
    step_config: step_lib.StepConfig = dataclasses.field(init=False)
    runner: run_lib.Runner = dataclasses.field(init=False)

    def __post_init__(self):
        model, capacity, width, kv_block = self.model, self.capacity, self.width, self.kv_block
        for name, size in (("capacity", capacity), ("width", width), ("kv_block", kv_block)):
            if type(size) is not int:
                raise errors.ConfigError(f"{name}: got {size!r} of type {type(size).__name__}, wanted an int")
        if capacity < 1 or capacity > 1 << 22:
            raise errors.ConfigError(f"capacity: got {errors.shown(capacity)}, wanted 1 to {1 << 22} tokens")
        if not isinstance(model, model_lib.Model):
            raise errors.InputError(f"model: {errors.mistaken(model, 'Model')}")
        config = step_lib.StepConfig(model.config, model.dtype, width, kv_block, mesh=model.mesh)
        determinism.assert_in_force()
        capacity = -(-capacity // kv_block) * kv_block
        num_slots, dtype = config.num_slots(capacity), config.jnp_dtype
        needed = cache_lib.device_bytes(model.config, num_slots, dtype, model.mesh)
        needed += rotary.tables_bytes(model.config, num_slots, dtype)
        purpose = f"a cache of {capacity} tokens and its rotary tables"
        device_memory.check(model.config.name, needed, sharding_lib.devices(model.mesh), purpose, "a smaller capacity")
        _warn_beyond(model.config.name, self.capacity, model.config.max_positions)
        tables = rotary.make_tables(model.config, num_slots, dtype, model.mesh)
        # A plain dict of dicts is the tree that jit takes apart fastest; nobody else holds this one.
        runner = run_lib.Runner(step_lib.programs(config), flax.core.unfreeze(model.params), tables)
        for name, value in (("capacity", capacity), ("step_config", config), ("runner", runner)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        config = self.step_config
        shape = f"capacity={self.capacity}, width={config.width}, kv_block={config.kv_block}"
        return f"Engine({config.model.name}, {config.dtype}, {shape})"

    @property
    def pin(self) -> pin_lib.Pin:
        """Returns the document of everything that decides the bits; equal for every engine of equal settings.

        Raises:
          DeterminismError: options of jax were changed after the engine compiled its programs; or the self-test failed.
        """
        self._check_programs()
        return self._pin

    @functools.cached_property
    def _pin(self) -> pin_lib.Pin:
        config, tokenizer, chat = self.step_config, self.model.tokenizer, self.model.chat
        device, *_ = jax.tree.leaves(self.model.params)[0].devices()
        thread_test.check(config, device)
        mesh = {} if config.mesh is None else {"mesh": {sharding_lib.AXIS: config.mesh.size}}
        return pin_lib.Pin(
            {
                "schema": pin_lib.SCHEMA,
                "model": config.model.document(),
                "weights": self.model.digest,
                "tokenizer": tokenizer.digest if tokenizer else None,
                "chat_template": chat.template_digest if chat else None,
                "dtype": config.dtype,
                "width": config.width,
                "kv_block": config.kv_block,
                "head_lanes": config.head_lanes,
                "rotary_rule": rotary.ENGINE_RULE,
                "rotary_tables": rotary.tables_digest(config.model),
                **mesh,
                **determinism.environment(device),
                **self._measure(),
            }
        )

    def _measure(self) -> dict[str, Any]:
        """Returns what was found of the programs under jax's present options; both are remembered for the process."""
        self_test_sha256 = self_test.result(self.runner, self.model.digest)
        return {"program": self.runner.programs.fingerprint, "self_test": self_test_sha256}

    def _check_programs(self) -> None:
        """Runs the self-test before the first result, and again when options of jax have changed since."""
        determinism.check_options()
        then, now = self._pin.document, self._measure()
        changed = [name for name, value in now.items() if then[name] != value]
        if changed:
            raise errors.DeterminismError(
                f"options of jax were changed after this engine was compiled, so {' and '.join(changed)} in its "
                "pin would not hold; set the options back, or make another Engine"
            )

    def prefill(self, token_ids: Sequence[int], *, progress: bool = False) -> state_lib.State:
        """Reads `token_ids` into a fresh context.

        Args:
          token_ids: one or more ids.
          progress: shows a bar on stderr.

        Raises:
          InputError: empty, or an id outside the vocabulary.
          CapacityError: more tokens than slots; before any compute.
        """
        determinism.check_options()
        planned = run_lib.plan_tokens(token_ids, self.model.config.vocab_size)
        run_lib.plan_capacity(0, len(planned), self.capacity, "new")
        self._check_programs()
        state = self._read(self._fresh_cache(), None, planned, progress=progress)
        if len(planned) > _TRIM_STEPS * self.step_config.width:
            state.logits.block_until_ready()
            host_memory.trim()
        return state

    def extend(self, state: state_lib.State, token_ids: Sequence[int], *, progress: bool = False) -> state_lib.State:
        """Reads `token_ids` after those of `state`, which stays as it is, and returns the new context.

        Raises:
          InputError: empty, an id outside the vocabulary, or a state of another engine.
          CapacityError: more tokens than slots; before any compute.
        """
        self._check_state(state)
        planned = run_lib.plan_tokens(token_ids, self.model.config.vocab_size)
        run_lib.plan_capacity(state.length, len(planned), self.capacity, "new")
        self._check_programs()
        return self._read(step_lib.copy_cache(state.cache), state, planned, progress=progress)

    def generate(
        self,
        state: state_lib.State,
        *,
        max_new_tokens: int = 32,
        stop_ids: Sequence[int] | None = None,
        on_token: Callable[[int, jax.Array], None] | None = None,
    ) -> tuple[list[int], state_lib.State]:
        """Decodes greedily: the token of the largest logit, the lowest id on a tie.

        Tokens that the model suppresses, and rows of the vocabulary without a piece in the tokenizer, are never chosen.

        Args:
          state: where to begin; stays as it is.
          max_new_tokens: the most tokens to decode.
          stop_ids: end before any of these; None means `model.stop_ids`, () none.
          on_token: called with each new token and the float32 [V] logits that follow it.

        Returns:
          The new tokens, a stop token not among them, and the context that has read them.

        Raises:
          CapacityError: `max_new_tokens` do not fit; before any compute.
          InputError: a number, state or stop tokens that cannot be used; before any compute.
          WeightsError: the model's logits are NaN.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise errors.InputError(f"max_new_tokens: got {errors.shown(max_new_tokens)}, wanted an int, 0 or more")
        self._check_state(state)
        run_lib.plan_capacity(state.length, max_new_tokens, self.capacity, "to decode")
        if stop_ids is None:
            stop_ids = self.model.stop_ids
        else:
            stop_ids = run_lib.plan_stops(stop_ids, self.model.config.vocab_size)
        self._check_programs()
        decoded = run_lib.decode(
            self.runner,
            step_lib.copy_cache(state.cache),
            state.logits,
            state.length,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(stop_ids),
            num_pieces=self.model.tokenizer.vocab_size if self.model.tokenizer else None,
            on_token=on_token,
        )
        token_ids = state.token_ids + decoded.token_ids
        after = dataclasses.replace(state, cache=decoded.cache, token_ids=token_ids, logits=decoded.logits_V)
        return list(decoded.token_ids), after

    def score(self, token_ids: Sequence[int], *, progress: bool = False) -> np.ndarray:
        """Computes next-token logits at every position of a fresh context: float32 [T, V] on the host.

        The result takes 4 V bytes a token.

        Exact: row t is bit-equal to the logits after a prefill of tokens 0..t, as long as all values are finite.

        Raises:
          InputError, CapacityError: as `prefill`.
        """
        determinism.check_options()
        planned = run_lib.plan_tokens(token_ids, self.model.config.vocab_size)
        run_lib.plan_capacity(0, len(planned), self.capacity, "new")
        self._check_programs()
        return run_lib.score(self.runner, self._fresh_cache(), planned, progress=progress)

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
        self._check_state(state)
        return capture_lib.capture(state, self.pin, provenance or {}, policy=policy)

    def graft(
        self, artifact: artifact_lib.Artifact, *, position: int = 0, allow_inexact: bool = False
    ) -> state_lib.State:
        """Puts the artifact's rows at their own positions in a fresh context, as if it had just read the text.

        Exact: bit-exact: K/V rows and logits equal those of the state that was captured, which are finite values.

        Args:
          artifact: what `capture` or `load_artifact` returned.
          position: its own, 0; another one is refused.
          allow_inexact: accept an artifact of another machine or program (device, software, width), though never of
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
        return graft_lib.graft(artifact, self.step_config, self.model.digest, self.capacity, exact=exact)

    def verify(self, artifact: artifact_lib.Artifact) -> verify_lib.Verification:
        """Reads an artifact's tokens again and compares every row and logit with what it holds.

        A pin is what the depositor says, and a digest only shows that the bytes are those of the deposit. This computes
        them anew: it costs as much as reading the text.

        Exact: equal exactly if the rows and logits are those that this engine computes, which are finite values.

        Returns:
          Whether they are equal, else where they differ first: layer, key or value, and position; or a logit.

        Raises:
          PinMismatch, CapacityError, IntegrityError, WindowError, InputError: as `graft`.
        """
        determinism.check_options()
        graft_lib.plan_graft(artifact, self.pin, self.step_config, self.capacity)
        return verify_lib.verify(artifact, self.prefill(artifact.token_ids))

    def _check_state(self, state: state_lib.State) -> None:
        determinism.check_options()
        if not isinstance(state, state_lib.State):
            raise errors.InputError(f"state: {errors.mistaken(state, 'State')}")
        ours = (self.step_config, self.model.digest, self.capacity)
        theirs = (state.step_config, state.weights, state.capacity)
        for name, our, their in zip(("step_config", "weights", "capacity"), ours, theirs, strict=True):
            if our != their:
                raise errors.InputError(
                    f"state: its {name} is {their}, this engine's is {our}; states live in the engine that made them, "
                    "artifacts move between engines"
                )

    def _fresh_cache(self) -> cache_lib.Cache:
        return self.step_config.make_cache(self.capacity)

    def _read(
        self, cache: cache_lib.Cache, before: state_lib.State | None, token_ids: tuple[int, ...], *, progress: bool
    ) -> state_lib.State:
        result = run_lib.run(self.runner, cache, token_ids, before.length if before else 0, progress=progress)
        logits_V = run_lib.next_logits(self.runner, result)
        if before is None:
            return state_lib.State(result.cache, token_ids, logits_V, self.step_config, self.model.digest)
        return dataclasses.replace(before, cache=result.cache, token_ids=before.token_ids + token_ids, logits=logits_V)


@functools.lru_cache(maxsize=64)
def _warn_beyond(name: str, capacity: int, max_positions: int) -> None:
    """Warns once per process of more tokens than the model has ever seen in one text."""
    if capacity > max_positions:
        warnings.warn(
            f"capacity: got {capacity} tokens, but {name} was trained on {max_positions} positions; what it computes "
            "beyond them is exact all the same, and means little",
            errors.KVGraftWarning,
            stacklevel=4,
        )
