"""Comparing two states: SHA-256 of logits and K/V rows, KL divergence, argmax."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from kvgraft_jax import digest, errors
from kvgraft_jax.grafting import capture, manifest
from kvgraft_jax.runtime import state as state_lib


@dataclasses.dataclass(frozen=True)
class StateHashes:
    """SHA-256 (hex) of a state's next-token logits and of the K/V rows that a policy keeps."""

    logits_sha256: str
    kv_sha256: str


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """How two states differ.

    Attributes:
      a, b: hashes of both.
      kl_nats: KL(a || b) of the next-token distributions, in nats, computed in float64.
      max_abs_logit_diff: largest absolute difference of the logits.
      argmax_agree: both would decode the same next token.
      tokens_equal: both hold the same tokens.
      exact: neither state descends from an inexact graft.
      policy: which K/V rows were compared.
    """

    a: StateHashes
    b: StateHashes
    kl_nats: float
    max_abs_logit_diff: float
    argmax_agree: bool
    tokens_equal: bool
    exact: bool
    policy: str

    @property
    def logits_equal(self) -> bool:
        """Returns whether the logits agree in every bit."""
        return self.a.logits_sha256 == self.b.logits_sha256

    @property
    def kv_equal(self) -> bool:
        """Returns whether the compared K/V rows agree in every bit."""
        return self.a.kv_sha256 == self.b.kv_sha256

    @property
    def equal(self) -> bool:
        """Tokens, logits and K/V rows agree in every bit."""
        return self.tokens_equal and self.logits_equal and self.kv_equal

    def __repr__(self) -> str:
        def row(name: str, a: str, b: str, verdict: str) -> str:
            return f"  {name:<14} {a:<18} {b:<18} {verdict}"

        def same(equal: bool) -> str:
            return "equal" if equal else "DIFFERENT"

        return "\n".join(
            [
                row("", "a", "b", ""),
                row("tokens", "", "", same(self.tokens_equal)),
                row("logits SHA-256", self.a.logits_sha256[:16], self.b.logits_sha256[:16], same(self.logits_equal)),
                row("K/V SHA-256", self.a.kv_sha256[:16], self.b.kv_sha256[:16], same(self.kv_equal)),
                row("KL (nats)", "", "", repr(self.kl_nats)),
                row("max |a - b|", "", "", repr(self.max_abs_logit_diff)),
                row("argmax", "", "", "agrees" if self.argmax_agree else "DIFFERENT"),
                *([] if self.exact else [row("exact", "", "", "false: a graft across machines or programs")]),
            ]
        )


def logits_sha256(logits_V: np.ndarray) -> str:
    """Returns the SHA-256 (hex) of the little-endian float32 bytes of logits [V], and of nothing else."""
    return digest.bytes_digest(digest.array_bytes(np.asarray(logits_V, np.float32)))


def hashes(state: state_lib.State, *, policy: str = manifest.VISIBLE_ROWS) -> StateHashes:
    """Computes the hashes of a state.

    The K/V hash covers, of every layer, the rows that the policy keeps: by default those that a next token can still
    see, so that a state grafted without its older sliding rows can be compared with a fresh one.
    """
    stacks = capture.read_stacks(state, policy)
    kv_document = [
        {"kind": s.kind, "layers": list(s.layers), "start": s.start, "kv": digest.array_digest(s.kv_Lx2xSxKxH)}
        for s in stacks
    ]
    return StateHashes(logits_sha256(jax.device_get(state.logits)), digest.json_digest({"kv": kv_document}))


def kl_nats(logits_a_V: np.ndarray, logits_b_V: np.ndarray) -> float:
    """Computes the KL divergence of two next-token distributions.

    Math: sum_i p_i (log p_i - log q_i), p and q the softmax of the logits (Kullback and Leibler 1951).
    Exact: 0.0 for equal logits.

    Args:
      logits_a_V, logits_b_V: [V] each; any float dtype, computed in float64.

    Returns:
      Nats.
    """
    log_p_V, log_q_V = _log_softmax(logits_a_V), _log_softmax(logits_b_V)
    return float(np.sum(np.exp(log_p_V) * (log_p_V - log_q_V)))


def compare(state_a: state_lib.State, state_b: state_lib.State, *, policy: str = manifest.VISIBLE_ROWS) -> Comparison:
    """Compares two states of the same model; the result prints as a table.

    Raises:
      InputError: something else than a state, or states of models with different vocabularies.
      CaptureError: a compared row holds NaN or an infinity.
      WindowError: policy "full" where one of them lacks the older sliding rows.
    """
    for name, given in (("state_a", state_a), ("state_b", state_b)):
        if not isinstance(given, state_lib.State):
            raise errors.InputError(f"{name}: {errors.mistaken(given, 'State')}")
    a_V, b_V = jax.device_get((state_a.logits, state_b.logits))
    if a_V.shape != b_V.shape:
        raise errors.InputError(f"states to compare: got vocabularies {a_V.shape[0]} and {b_V.shape[0]}, wanted one")
    return Comparison(
        a=hashes(state_a, policy=policy),
        b=hashes(state_b, policy=policy),
        kl_nats=kl_nats(a_V, b_V),
        max_abs_logit_diff=float(np.max(np.abs(a_V.astype(np.float64) - b_V.astype(np.float64)))),
        argmax_agree=bool(np.argmax(a_V) == np.argmax(b_V)),
        tokens_equal=state_a.token_ids == state_b.token_ids,
        exact=state_a.exact and state_b.exact,
        policy=policy,
    )


def _log_softmax(logits_V: np.ndarray) -> np.ndarray:
    wide_V = np.asarray(logits_V, np.float64)
    shifted_V = wide_V - np.max(wide_V)
    return shifted_V - np.log(np.sum(np.exp(shifted_V)))
