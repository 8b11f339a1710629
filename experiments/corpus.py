"""A text that every user has: the docstrings of Python's standard library, read from its sources at run time.

It is the same for everyone with the same Python version; its digest goes into the results.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
import dataclasses
import functools
import importlib.util
import pathlib

import kvgraft_jax as kg
from kvgraft_jax import digest, errors

MODULES = (
    "argparse", "collections", "configparser", "contextlib", "datetime", "difflib", "doctest", "email.message",
    "fractions", "heapq", "inspect", "ipaddress", "logging", "mailbox", "optparse", "pickle", "random", "shutil",
    "statistics", "subprocess", "tarfile", "textwrap", "threading", "turtle", "typing", "urllib.request", "zipfile",
)  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def documents() -> tuple[str, ...]:
    """Returns the docstrings of `MODULES`, in their order in the sources."""
    found = []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.origin or not pathlib.Path(spec.origin).is_file():
            raise errors.InputError(f"the standard library's {module} has no source file here, wanted a full Python")
        tree = ast.parse(pathlib.Path(spec.origin).read_bytes())
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _DOCUMENTED))
        found += [text for text in texts if text]
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The documents as tokens of one model.

    Attributes:
      documents: token ids of each.
      bos_id: what every sample begins with.
      sha256: of the texts.
    """

    documents: Sequence[tuple[int, ...]]
    bos_id: int
    sha256: str

    def sample(self, first: int, num_tokens: int) -> tuple[int, ...]:
        """Returns `num_tokens` tokens: begin of text, then the documents from number `first` on."""
        token_ids = [self.bos_id]
        while len(token_ids) < num_tokens:
            token_ids += self.documents[first % len(self.documents)]
            first += 1
        return tuple(token_ids[:num_tokens])


def tokenize(model: kg.Model) -> Corpus:
    """Returns the corpus for a model; one without a tokenizer reads the UTF-8 bytes, modulo its vocabulary."""
    texts = [text + "\n\n" for text in documents()]
    if model.tokenizer is None:
        ids = [tuple(byte % model.config.vocab_size for byte in text.encode()) for text in texts]
        bos_id = model.config.bos_id % model.config.vocab_size
    else:
        ids = [tuple(model.tokenizer.encode(text)) for text in texts]
        bos_id = model.tokenizer.bos_id
    return Corpus(ids, bos_id, digest.json_digest(texts))
