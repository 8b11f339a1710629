"""The other side of a comparison: a worker process that runs transformers and is idle unless it is asked."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import subprocess

from kvgraft_jax import errors

ROOT = pathlib.Path(__file__).parents[2]
DEFAULT_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
_WORKER = ROOT / "experiments" / "bench" / "peers" / "transformers_worker.py"

DTYPES = ("bfloat16", "float32")
CACHES = ("dynamic", "static")


@dataclasses.dataclass(frozen=True)
class Description:
    """What the worker runs: versions by distribution, threads, and the attention implementation."""

    versions: dict[str, str]
    threads: int
    attention: str


class Transformers:
    """A checkpoint in transformers, one model per dtype, in a process of its own. Close it, or use it in `with`.

    Every call blocks until the worker has answered, so it never computes while the caller does.
    """

    def __init__(self, python: pathlib.Path, directory: pathlib.Path, threads: int):
        """Args:
          python: interpreter of an environment with requirements-peers.txt.
          directory: Hugging Face checkpoint.
          threads: of torch.

        Raises:
          ConfigError: the interpreter is missing, or the worker cannot load the model.
        """
        if not pathlib.Path(python).is_file():
            raise errors.ConfigError(f"peers: found no {python}; run: bash workspace.sh peers")
        environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, "-I", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            loaded = self._ask("load", {"directory": str(directory), "dtypes": DTYPES, "threads": threads})
        except BaseException:
            self.close()
            raise
        self.description = Description(**loaded)

    def prefill(self, dtype: str, token_ids: Sequence[int]) -> float:
        """Measures the seconds until a fresh context has read all tokens and named the next one."""
        return self._ask("prefill", {"dtype": dtype, "token_ids": token_ids})["seconds"]

    def next_token(self, dtype: str, token_ids: Sequence[int]) -> int:
        """Returns the greedy next token."""
        return self._ask("prefill", {"dtype": dtype, "token_ids": token_ids})["token_id"]

    def decode(self, dtype: str, cache: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Measures the seconds of `new_tokens` greedy steps after prompts of one length, which are not counted."""
        request = {"dtype": dtype, "cache": cache, "prompts": prompts, "new_tokens": new_tokens}
        return self._ask("decode", request)["seconds"]

    def close(self) -> None:
        """Ends the worker."""
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Transformers:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _ask(self, name: str, arguments: dict) -> dict:
        try:
            self._process.stdin.write(json.dumps({"ask": name, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # It has ended: so has its stdout.
        line = self._process.stdout.readline()
        if not line:
            raise errors.ConfigError(f"peers: the worker ended with {self._process.wait()}; its last words are above")
        answer = json.loads(line)
        if "error" in answer:
            raise errors.ConfigError(f"peers: {name}: {answer['error']}; wanted requirements-peers.txt installed")
        return answer
