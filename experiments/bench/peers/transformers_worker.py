"""Runs transformers on request: one JSON document a line on stdin, one on stdout; idle between requests.

Runs in the environment of requirements-peers.txt and knows nothing of kvgraft_jax. Started by `benchmark.peer`.
"""

from __future__ import annotations

from collections.abc import Callable
import importlib.metadata
import json
import os
import sys
import time
import traceback


class _StepClock:
    """A stopping criterion that notes when each step of a generation ends, and stops nothing."""

    def __init__(self):
        self.arrivals_s: list[float] = []

    def __call__(self, input_ids, _scores, **_):
        import torch

        self.arrivals_s.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Worker:
    """Models by dtype, and the work that a request may ask for; each method answers with plain JSON data."""

    def __init__(self):
        self._models = {}

    def load(self, directory: str, dtypes: list[str], threads: int) -> dict:
        """Loads one copy of a checkpoint per dtype."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        for dtype in dtypes:
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
            self._models[dtype] = model.eval()
        attention = next(iter(self._models.values())).config._attn_implementation
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        return {"versions": versions, "threads": torch.get_num_threads(), "attention": attention}

    def prefill(self, dtype: str, token_ids: list[int]) -> dict:
        """Runs one forward pass that fills a fresh cache and computes the logits of the last position only."""
        import torch

        start = time.perf_counter()
        output = self._models[dtype](torch.tensor([token_ids]), use_cache=True, logits_to_keep=1)
        token_id = int(output.logits[0, -1].argmax())
        return {"seconds": time.perf_counter() - start, "token_id": token_id}

    def decode(self, dtype: str, cache: str, prompts: list[list[int]], new_tokens: int) -> dict:
        """Runs greedy `generate` on prompts of one length; measures `new_tokens` steps of all of them together.

        The clock starts when the prompts have been read, as far as a step tells: with the end of the first one.
        """
        import torch

        model, clock = self._models[dtype], _StepClock()
        prompt = torch.tensor(prompts)
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens + 1,
            eos_token_id=None,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            stopping_criteria=[clock],
        )
        arrivals_s = clock.arrivals_s
        if len(arrivals_s) != new_tokens + 1:
            raise RuntimeError(f"generate gave {len(arrivals_s)} tokens, wanted {new_tokens + 1}")
        return {"seconds": arrivals_s[-1] - arrivals_s[0], "token_ids": output[:, len(prompts[0]) :].tolist()}

    def requests(self) -> dict[str, Callable[..., dict]]:
        """Returns the names of the work that a request may ask for."""
        return {"load": self.load, "prefill": self.prefill, "decode": self.decode}


def main() -> None:
    """Answers requests {"ask": NAME, ...arguments} until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Whatever a library prints must not mix with the answers.
    requests = Worker().requests()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = requests[request.pop("ask")](**request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
