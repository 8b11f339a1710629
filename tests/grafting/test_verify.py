"""Verification: a deposit that is what its tokens give, and every kind that is not; tokens outside the vocabulary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvgraft_jax import errors
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import manifest
from tests import tiny

LENGTH = 40


def deposit(policy: str = manifest.VISIBLE_ROWS) -> artifact_lib.Artifact:
    """Returns an artifact of the small model."""
    engine = tiny.engine()
    return engine.capture(engine.prefill(tiny.tokens(LENGTH)), policy=policy)


def with_rows(artifact: artifact_lib.Artifact, kind: str, change) -> artifact_lib.Artifact:
    """Returns the artifact with the rows of one kind changed, all digests made anew."""
    stacks = []
    for stack in artifact.stacks:
        kv_Lx2xSxKxH = np.array(stack.kv_Lx2xSxKxH)
        if stack.kind == kind:
            change(kv_Lx2xSxKxH.view(np.uint16))
        stacks.append(dataclasses.replace(stack, kv_Lx2xSxKxH=kv_Lx2xSxKxH))
    return dataclasses.replace(artifact, stacks=tuple(stacks))


@pytest.mark.parametrize("policy", manifest.POLICIES)
def test_a_true_deposit_is_equal(policy):
    found = tiny.engine().verify(deposit(policy))
    assert found and found.equal and found.difference is None and "equal to a second reading" in str(found)


@pytest.mark.parametrize("policy", manifest.POLICIES)
@pytest.mark.parametrize(("kind", "layers"), [("sliding", (0, 1, 2, 3, 4, 6)), ("full", (5,))])
@pytest.mark.parametrize("side", [0, 1])
def test_one_bit_of_a_row_is_named(policy, kind, layers, side):
    artifact = deposit(policy)
    (stack,) = (stack for stack in artifact.stacks if stack.kind == kind)
    assert stack.layers == layers
    for index in (0, len(layers) - 1):

        def flip(bits_Lx2xSxKxH, index=index):
            bits_Lx2xSxKxH[index, side, 3, 1, 2] ^= 1
            bits_Lx2xSxKxH[-1, 1, -1, 1, 2] ^= 1

        found = tiny.engine().verify(with_rows(artifact, kind, flip))
        assert not found and not found.equal
        name = ("key", "value")[side]
        assert found.difference == f"the {name} of layer {layers[index]} at position {stack.start + 3}"


def test_swapped_keys_and_values_graft_but_do_not_verify():
    def swap(bits_Lx2xSxKxH):
        bits_Lx2xSxKxH[:] = bits_Lx2xSxKxH[:, ::-1].copy()

    swapped = with_rows(deposit(), "full", swap)
    assert tiny.engine().graft(swapped).exact
    assert tiny.engine().verify(swapped).difference == "the key of layer 5 at position 0"


def test_other_logits_are_named():
    artifact = deposit()
    logits_V = np.array(artifact.logits_V)
    logits_V[[7, 9]] = [1.5, 2.5]
    found = tiny.engine().verify(dataclasses.replace(artifact, logits_V=logits_V))
    assert found.difference.startswith("the logit of token 7, ") and "1.5" in found.difference


def test_other_tokens_are_found():
    artifact = deposit(manifest.ALL_ROWS)
    token_ids = (artifact.token_ids[0] ^ 1, *artifact.token_ids[1:])
    found = tiny.engine().verify(dataclasses.replace(artifact, token_ids=token_ids))
    assert found.difference == "the key of layer 0 at position 0"


def test_an_artifact_of_another_pin_or_length_is_refused_as_by_graft():
    with pytest.raises(errors.PinMismatch):
        tiny.engine("float32").verify(deposit())
    with pytest.raises(errors.CapacityError):
        tiny.engine(capacity=32).verify(deposit())


def test_tokens_outside_the_vocabulary_are_refused():
    artifact = deposit()
    foreign = dataclasses.replace(artifact, token_ids=(*artifact.token_ids[:-1], 512))
    for call in (tiny.engine().graft, tiny.engine().verify):
        with pytest.raises(errors.IntegrityError, match="token_ids: got 512, wanted 0 to 511"):
            call(foreign)
