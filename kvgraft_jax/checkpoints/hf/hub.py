"""Finds the files of a model by name: a directory, or a repository of the Hugging Face Hub, cached or downloaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
import contextlib
import dataclasses
import errno
import glob
import json
import os
import pathlib
import re
import shutil
from urllib import parse, request
import warnings

import huggingface_hub
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors
from huggingface_hub import utils as hub_utils
import tqdm

from kvgraft_jax import device_memory, errors, paths, progress, remembered
from kvgraft_jax.checkpoints.hf import config as config_lib
from kvgraft_jax.checkpoints.hf import safetensors_file

_DIRECTORY = "a directory with config.json and safetensors files"
_DIRECTORY_MARKS = ("/", "~", "./", "../")  # What begins with one of them is never a name on the Hub.
_REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
_SHA256 = re.compile("[0-9a-f]{64}")
_TEXTS = (
    *("config.json", "generation_config.json", safetensors_file.INDEX),
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json"),
)
_LOGIN = "run `hf auth login`, or set HF_TOKEN to a token that may read it"
_NOT_CACHED = (hub_errors.LocalEntryNotFoundError, hub_errors.CachedRepoTreeNotFoundError)
_MOST_SHOWN = 400  # Characters of a name, in a message.
# What the client raises: answers and connections, files and disks, a token that is not ASCII, what is not JSON.
_CLIENT_ERRORS = (hub_errors.HTTPError, OSError, UnicodeEncodeError, json.JSONDecodeError)
# How the storage behind the Hub begins what it tells in a RuntimeError.
_STORAGE_SIGNS = ("I/O error", "IO error", "Network error", "Data processing error", "CAS service error")
_SCHEMES = ("http", "https")
_PROXY_SCHEMES = (*_SCHEMES, "socks5", "socks5h")


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of one model.

    Attributes:
      directory: holds those that are read.
      names: of all files in the directory or at the top of the repository, those that were not downloaded included.
      source: `hf:OWNER/NAME@COMMIT` for a repository; None for a directory.
    """

    directory: pathlib.Path
    names: frozenset[str]
    source: str | None


def find(name: str) -> Files:
    """Finds the files of the model `name`; downloads those that are needed and not in the local cache.

    A directory of that name is taken before a repository. A whole snapshot in the cache is used without any request,
    so a branch that has moved since is not noticed. Cache, token and address are those of `huggingface_hub`: HF_HOME,
    HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.

    Args:
      name: a directory, OWNER/NAME, or OWNER/NAME@REVISION with a branch, tag or commit. What begins with `/`, `./`,
        `../` or `~` is a directory.

    Raises:
      InputError: a path that names nothing, such as the home directory of nobody, or an address.
      WeightsError: neither is found, the Hub cannot be reached or refuses, or a file is not the one that the Hub holds.
      ConfigError: a configuration that this package does not compute; raised before weights are downloaded.
      ResourceError: the disk has too little space free, or memory, threads or file handles ran out.
    """
    directory = paths.absolute(name, "hf:")
    is_path = name.startswith(_DIRECTORY_MARKS) or name in (".", "..")
    if is_path or os.path.exists(name):  # As the system has it: `..` behind what does not exist is nothing.
        if directory.is_dir():
            return Files(directory, frozenset(path.name for path in directory.iterdir() if path.is_file()), None)
        problem = "is a file" if directory.exists() else "there is no such directory"
        raise errors.WeightsError(f"{directory}: {problem}; wanted {_DIRECTORY}")
    repository, at, revision = name.partition("@")
    return _Repository(repository, revision if at else hub_constants.DEFAULT_REVISION).files()


@dataclasses.dataclass(frozen=True)
class _Repository:
    name: str
    revision: str

    def files(self) -> Files:
        """Finds the files of the repository, in the cache if all are there."""
        self._check_names()
        with contextlib.suppress(*_NOT_CACHED):
            return self._files(is_local=True)
        return self._files(is_local=False)

    def _files(self, is_local: bool) -> Files:
        directory = self._snapshot(self.revision, _TEXTS, is_local)
        sizes = self._sizes(directory, is_local)
        config_lib.read_config(directory)  # Before anything large is fetched for a model that would be refused.
        weights = safetensors_file.stored_files(directory, sizes.keys()).keys()
        if missing := weights - sizes.keys():
            raise self._error(
                f"its {safetensors_file.INDEX} lists {errors.shown(sorted(missing))}, which it does not hold",
                "name another revision",
            )
        if not is_local:
            _check_space(directory, {name: sizes[name] for name in weights})
        self._snapshot(directory.name, weights, is_local)
        for name in weights:
            _check_digest(directory / name)
        return Files(directory, frozenset(sizes), f"hf:{self.name}@{directory.name}")

    def _snapshot(self, revision: str, names: Collection[str], is_local: bool) -> pathlib.Path:
        """Returns the cache's directory of a revision after the named files, as far as they exist, are in it."""
        with contextlib.nullcontext() if is_local else self._as_ours():
            directory = huggingface_hub.snapshot_download(
                self.name,
                revision=revision,
                allow_patterns=[glob.escape(name) for name in names],
                local_files_only=is_local,
                tqdm_class=_open_bar,
            )
        return pathlib.Path(directory)

    def _sizes(self, directory: pathlib.Path, is_local: bool) -> dict[str, int]:
        """Returns the bytes of every file at the top of the repository, downloaded or not."""
        try:
            listed = huggingface_hub.get_cached_repo_tree(self.name, revision=directory.name)
            return {file.path: file.size for file in listed if "/" not in file.path}
        except hub_errors.CachedRepoTreeNotFoundError:
            if is_local:
                raise
        warnings.warn(
            f"hf:{self}: the Hub gave no list of this model's files and the cache has none, so the files in "
            f"{directory} are taken for all of them",
            errors.KVGraftWarning,
            stacklevel=2,
        )
        return {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}

    def _check_names(self) -> None:
        """Raises unless both can be names on the Hub."""
        wanted = f"use {_DIRECTORY}, OWNER/NAME, or OWNER/NAME@REVISION"
        if self.name.count("/") != 1:
            raise self._error(f"its name is {errors.shown(self.name)}, wanted OWNER/NAME", wanted)
        try:
            hub_utils.validate_repo_id(self.name)
        except hub_errors.HFValidationError as error:
            raise self._error(str(error).rstrip("."), wanted) from None
        if not _REVISION.fullmatch(self.revision) or ".." in self.revision or len(self.revision) > 255:
            raise self._error(f"its revision is {errors.shown(self.revision)}, wanted a branch, tag or commit", wanted)

    @contextlib.contextmanager
    def _as_ours(self) -> Iterator[None]:
        """Turns what the client raises into a typed error that says what to do; a mistake of a program stays itself."""
        self._check_addresses()
        try:
            yield
        except hub_errors.GatedRepoError as error:
            page = f"{hub_constants.ENDPOINT}/{self.name}"
            raise self._error("it is gated", f"accept its terms at {page}, then {_LOGIN}") from error
        except hub_errors.RepositoryNotFoundError as error:
            raise self._error("there is none of that name, or it is private", f"check the name, or {_LOGIN}") from error
        except hub_errors.RevisionNotFoundError as error:
            problem = f"it has no revision {self.revision!r}"
            raise self._error(problem, "name a branch, tag or commit of it after the @") from error
        except (*_CLIENT_ERRORS, MemoryError, RuntimeError) as error:
            if device_memory.is_want(error):
                raise errors.ResourceError(
                    f"hf:{self}: memory, threads or file handles ran out ({_said(error)}), and nothing is known "
                    "against the model; end other programs, or raise the limit (ulimit -v, -u, -n), and load it again"
                ) from error
            if _is_full(error):
                raise errors.ResourceError(_no_space(f"hf:{self}: the disk is full")) from error
            if not isinstance(error, _CLIENT_ERRORS) and not str(error).startswith(_STORAGE_SIGNS):
                raise
            raise self._error(*_failure(error)) from error

    def _check_addresses(self) -> None:
        """Raises unless the Hub and the proxies have addresses; the client's own error has no public name."""
        given = request.getproxies()
        proxies = {kind: given[kind] for kind in (*_SCHEMES, "all") if given.get(kind)}
        addresses = {f"the proxy for {kind}": address for kind, address in proxies.items()}
        for name, address in {"HF_ENDPOINT": hub_constants.ENDPOINT, **addresses}.items():
            schemes = _SCHEMES if name == "HF_ENDPOINT" else _PROXY_SCHEMES
            is_whole = name == "HF_ENDPOINT" or "://" in address
            if not _is_address(address if is_whole else f"http://{address}", schemes):
                problem = f"it cannot be asked for, since {name} is {errors.shown(address)}"
                raise self._error(problem, f"set it to an address that begins with {' or '.join(schemes)}")

    def _error(self, problem: str, remedy: str) -> errors.WeightsError:
        given = str(self) if len(str(self)) <= _MOST_SHOWN else f"{str(self)[:_MOST_SHOWN]}..."
        return errors.WeightsError(
            f"hf:{given}: there is no directory {pathlib.Path.cwd() / given}, and as a model on the Hub {problem}; "
            f"{remedy}"
        )

    def __str__(self) -> str:
        is_default = self.revision == hub_constants.DEFAULT_REVISION
        return self.name if is_default else f"{self.name}@{self.revision}"


def _failure(error: Exception) -> tuple[str, str]:
    """Returns what failed and what to do about it."""
    cause = error.__cause__ if isinstance(error, hub_errors.LocalEntryNotFoundError) else None
    error = cause or error
    said = _said(error)
    status = error.response.status_code if isinstance(error, hub_errors.HfHubHTTPError) else None
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return (
            f"it is not whole in the cache {hub_constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to fetch it",
            "unset HF_HUB_OFFLINE, set HF_HUB_CACHE to a cache that holds it, or name a directory",
        )
    if status in (401, 403):
        return f"the Hub refuses access ({said})", _LOGIN
    if status is not None:
        return f"the Hub answered with an error ({said})", "try again later"
    if isinstance(error, hub_errors.HTTPError):
        return (
            f"the connection to {hub_constants.ENDPOINT} failed ({said})",
            "load it again; check the network, the proxy and HF_ENDPOINT, or fetch the files elsewhere and name their "
            "directory",
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"the cache {hub_constants.HF_HUB_CACHE} cannot be written ({said})", "set HF_HUB_CACHE to another"
    if isinstance(error, OSError):
        return f"a file did not arrive whole ({said})", "load it again"
    if isinstance(error, RuntimeError):
        return f"the storage behind the Hub failed ({said})", "load it again"
    return f"the client of the Hub failed ({said})", "check HF_ENDPOINT, HF_TOKEN and the proxy's address"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _is_address(text: str, schemes: Collection[str]) -> bool:
    try:
        address = parse.urlsplit(text)
        _ = address.port  # Raises for one that is not a number.
    except ValueError:
        return False
    return address.scheme in schemes and bool(address.hostname)


def _is_full(error: Exception) -> bool:
    is_known = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_known or os.strerror(errno.ENOSPC) in str(error)  # The storage's client tells it in words.


def _check_space(directory: pathlib.Path, sizes: Mapping[str, int]) -> None:
    """Raises a `ResourceError` unless the disk has space for the files that are not in the directory yet."""
    wanted = sum(size for name, size in sizes.items() if not (directory / name).exists())
    free = shutil.disk_usage(directory).free
    if wanted > free:
        raise errors.ResourceError(_no_space(f"{directory}: {wanted} bytes are to be downloaded, {free} are free"))


def _no_space(problem: str) -> str:
    return f"{problem}; free some space in {hub_constants.HF_HUB_CACHE}, or set HF_HUB_CACHE to a larger disk"


def _check_digest(path: pathlib.Path) -> None:
    """Raises unless a file's bytes are those after whose SHA-256 the cache has named it, as it does all large files."""
    expected = pathlib.Path(os.readlink(path)).name if path.is_symlink() else ""
    if _SHA256.fullmatch(expected) and (found := remembered.file_digest(path.resolve())) != expected:
        raise errors.WeightsError(
            f"{path}: has SHA-256 {found}, but the Hub's file has {expected}; delete {path.resolve()} and load it again"
        )


def _open_bar(
    *, total: float | None = None, desc: str = "", unit: str = "it", unit_scale: bool = False, **_: object
) -> tqdm.tqdm:
    """Opens a bar for the client; it takes what the client passes to a tqdm."""
    is_shown = progress.is_terminal() and not hub_utils.are_progress_bars_disabled()
    return progress.bar(total, description=desc, unit=unit, in_thousands=unit_scale, is_shown=is_shown)
