"""The identity of an engine: its pin, and the checks that keep the pin true while the engine is used."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kvgraft_jax import determinism, digest, errors, self_test, thread_test
from kvgraft_jax import pin as pin_lib
from kvgraft_jax.gemma import rotary, sharding
from kvgraft_jax.runtime import model as model_lib
from kvgraft_jax.runtime import run as run_lib
from kvgraft_jax.runtime import sampling


class Identity:
    """What decides the bits of one model and one runner on one device."""

    def __init__(self, model: model_lib.Model, runner: run_lib.Runner, device: jax.Device):
        self._model, self._runner, self._device = model, runner, device

    @property
    def pin(self) -> pin_lib.Pin:
        """Returns the pin, after `check`."""
        self.check()
        return self._pin

    def check(self) -> None:
        """Runs the self-test before the first result, and again when options of jax have changed since.

        Raises:
          DeterminismError: options of jax were changed after the programs were compiled; or the self-test failed.
        """
        determinism.check_options()
        then, now = self._pin.document, self._measure()
        changed = [name for name, value in now.items() if then[name] != value]
        if changed:
            raise errors.DeterminismError(
                f"options of jax were changed after this engine was compiled, so {' and '.join(changed)} in its "
                "pin would not hold; set the options back, or make another Engine"
            )

    @functools.cached_property
    def _pin(self) -> pin_lib.Pin:
        config, tokenizer, chat = self._runner.programs.config, self._model.tokenizer, self._model.chat
        thread_test.check(config, self._device)
        some = {} if config.mesh is None else {"mesh": {sharding.AXIS: config.mesh.size}}
        if config.width is not None:
            some["width"] = config.width
        return pin_lib.Pin(
            {
                "schema": pin_lib.SCHEMA,
                "model": config.model.document(),
                "weights": self._model.digest,
                "tokenizer": tokenizer.digest if tokenizer else None,
                "chat_template": chat.template_digest if chat else None,
                "dtype": config.dtype,
                "kv_block": config.kv_block,
                "rotary_rule": rotary.ENGINE_RULE,
                "rotary_tables": rotary.tables_digest(config.model),
                **some,
                **determinism.environment(self._device),
                **self._measure(),
            }
        )

    def _measure(self) -> dict[str, Any]:
        """Returns what was found of the programs under jax's present options; both are remembered for the process."""
        runner = self._runner
        num_blocks = runner.programs.config.num_blocks(runner.num_positions)
        sizes = self_test.Sizes(runner.shapes[0], num_blocks, 1)
        vocab_size = self._model.config.vocab_size
        left = {
            "steps": self_test.result(runner, self._model.digest, sizes),
            "draws": sampling.fixed_draws(vocab_size),
        }
        return {
            "program": {**runner.programs.fingerprint, "draw": sampling.fingerprint(vocab_size)},
            "self_test": digest.json_digest(left),
        }
