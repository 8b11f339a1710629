"""Detectors: the two causes by which bits came to depend on the width of a step, put back, must be seen.

`plain_sums` leaves sums over a row to XLA. `uncut_products` leaves products to its library as they are: a sum of any
length in one piece, all rows at once, and a single row by itself. Whether two widths then round alike depends on
processor, dtype and lengths, so a detector compares one width after the other with the narrowest one until a hash
differs. The last is a step of one lane, which no engine has: there a library converts bfloat16 weights first. A
detector that never fires fails the claim, and the results list every try.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.width_invariance import readings
import kvgraft_jax as kg
from kvgraft_jax.gemma import parameters as parameters_lib
from kvgraft_jax.gemma import products
from kvgraft_jax.gemma import sharding as sharding_lib
from kvgraft_jax.runtime import run as run_lib

PLAIN_SUMS, UNCUT_PRODUCTS = "plain_sums", "uncut_products"
_ONE_PIECE = 1 << 30


@contextlib.contextmanager
def plain_sums(model: kg.Model) -> Iterator[Mapping]:
    """Leaves sums over a row to XLA in programs traced meanwhile; gives the parameters for them."""
    with mock.patch.object(products, "row_sum", functools.partial(jnp.sum, axis=-1)):
        yield model.params


@contextlib.contextmanager
def uncut_products(model: kg.Model) -> Iterator[Mapping]:
    """Leaves products to the library in programs traced meanwhile; gives the parameters for them, each in one piece."""
    whole = mock.patch.object(products, "LONGEST", _ONE_PIECE)
    anyhow = mock.patch.object(products, "_CUT_BY_ROWS", {})
    at_once = mock.patch.object(products, "_by_rows", lambda x_TxD, multiply: multiply(x_TxD))
    with whole, anyhow, at_once:
        arrays = parameters_lib.whole(model.config, model.params)
        leaves = {}
        for parameter in parameters_lib.parameters(model.config):
            place = sharding_lib.of_parameter(model.mesh, parameter, parameter.shape)
            leaves[parameter.path] = parameter.leaf([jax.device_put(arrays.pop(parameter.path), place)])
        yield parameters_lib.nest(leaves)


CAUSES = {PLAIN_SUMS: plain_sums, UNCUT_PRODUCTS: uncut_products}


def run(
    model: kg.Model, kv_block: int, shapes: Sequence[int], token_ids: Sequence[int]
) -> Iterator[dict[str, str | bool]]:
    """Puts each cause back and compares widths until two differ; gives a row for each comparison.

    Args:
      model: the one under test.
      kv_block: slots per attention block.
      shapes: widths, rising.
      token_ids: the text.
    """
    narrowest, *others = shapes
    for name, put_back in CAUSES.items():
        with put_back(model) as params:
            runner = dataclasses.replace(readings.make_runner(model, kv_block, len(token_ids)), params=params)
            against = _read(runner, model, narrowest, token_ids)
            for width in (*reversed(others), 1):
                found = _read(runner, model, width, token_ids)
                fired = found != against
                yield {
                    "detector": name,
                    "setting": f"{width} lanes against {narrowest}",
                    "fired": fired,
                    "sha256": found,
                    "against_sha256": against,
                }
                if fired:
                    break


def _read(runner: run_lib.Runner, model: kg.Model, width: int, token_ids: Sequence[int]) -> str:
    """Returns the hash of all rows and of the logits after every token."""
    plan = readings.single(width, len(token_ids))
    return readings.read(runner, model.digest, plan, token_ids, range(len(token_ids) - 1)).sha256
