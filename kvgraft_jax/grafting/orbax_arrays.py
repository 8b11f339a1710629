"""Arrays of an artifact as an Orbax checkpoint: saved by Orbax, read back as the plain bytes that they are.

Orbax saves each array uncompressed, as one chunk, so a load needs neither Orbax nor its threads: it works in a forked
process, in a `jax.distributed` job, at interpreter shutdown and where no thread can be started. Orbax works in none of
these, so there a save runs it in a process of its own: `python -m kvgraft_jax.grafting.orbax_arrays`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import thread as threads
import contextlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np
from orbax.checkpoint import v1 as ocp

from kvgraft_jax import children, device_memory, digest, errors, forks

STATE = "state"
NOTES = ("_CHECKPOINT_METADATA", "orbax.checkpoint", f"{STATE}/_METADATA")
"""Files that Orbax writes beside the arrays."""

_ZARRAY = ".zarray"
_DTYPES = {"bfloat16": "bfloat16", "float32": "<f4", "int32": "<i4"}
_LOCK = threading.Lock()  # A save waits for signals under the number of the latest one in the process.
_LAST_WORDS = 2000
_REFUSED = "os_error_code="  # TensorStore marks with it what the system refused, such as a write to a full disk.
_EXIT_CODES = {OSError: 81, MemoryError: 82}


def files_of(name: str, num_axes: int) -> tuple[str, str]:
    """Returns the two files of an array, relative to the checkpoint: its description and its one chunk."""
    return f"{STATE}/{name}/{_ZARRAY}", f"{STATE}/{name}/{'.'.join('0' * num_axes)}"


def difference(raw: bytes, dtype: str, shape: tuple[int, ...]) -> str:
    """Says how an array's description differs from an uncompressed array of this dtype and shape; "" if it does not.

    Raises:
      ValueError: the description is not a JSON object.
    """
    noted = digest.parse_json(raw)
    if not isinstance(noted, dict):
        raise ValueError(f"got a JSON {type(noted).__name__}, wanted an object")
    wanted = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(shape),
        "dtype": _DTYPES[dtype],
        "order": "C",
        "compressor": None,
        "filters": None,
    }
    for field, value in wanted.items():
        if field not in noted or noted[field] != value:
            return f"stored with {field} {errors.shown(noted.get(field))}, wanted {value!r}"
    return ""


def read(path: pathlib.Path, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Reads one array from its chunk, whose size the caller has compared with dtype and shape.

    Exact: the stored bits. Nothing is verified here; the caller compares digests.

    Raises:
      EOFError: the chunk ends early.
      OSError: it cannot be read.
    """
    array = np.empty(shape, dtype)
    with open(path / files_of(name, len(shape))[1], "rb") as file:
        if file.readinto(digest.array_bytes(array)) != array.nbytes:
            raise EOFError(f"{name}: ends early, wanted {array.nbytes} bytes")
    return array if sys.byteorder == "little" else array.byteswap(inplace=True)


def save(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Saves arrays with Orbax, in a process of its own where Orbax cannot run in this one.

    Raises:
      StorageError: the other process could not be started.
      ResourceError: a signal ended the other process, as happens where threads or memory run out.
      OSError: the system refused to write.
    """
    if _can_run_here():
        forks.use_tensorstore("saving an artifact")  # So that a child forked later knows.
        try:
            _save_here(path, arrays)
        except RuntimeError as error:  # Perhaps the last thread went to someone else, or the process began to end.
            if _can_run_here() and not device_memory.is_want(error):
                raise
            for begun in path.parent.glob(f"{path.name}*"):
                shutil.rmtree(begun)
            _save_elsewhere(path, arrays)
    else:
        _save_elsewhere(path, arrays)
    (path / "commit_success.txt").unlink()  # Names a path of this machine; the entry's rename is the commit.


def _save_here(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Saves in a thread of its own, so that an interrupt, which reaches the main thread, waits until Orbax has ended.

    Orbax's own threads would go on writing, or wait for a signal that nobody sends any more.
    """
    with threads.ThreadPoolExecutor(1) as pool:
        pool.submit(_run_orbax, path, arrays).result()


def _run_orbax(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    try:
        with _settings():
            ocp.save(path, dict(arrays), checkpointable_name=STATE)
    except (ValueError, IndexError) as error:
        if _REFUSED not in str(error):
            raise
        raise OSError(str(error)[:_LAST_WORDS]) from error


def _can_run_here() -> bool:
    """Tells whether Orbax can save here: a process of one job, not forked, not ending, in which threads can start.

    In a job of several processes Orbax waits for all of them; after a fork its threads and locks are gone.
    """
    if forks.is_forked() or jax.distributed.is_initialized():
        return False
    try:
        with threads.ThreadPoolExecutor(1) as pool:  # As Orbax uses it; it takes no work from when the process ends.
            pool.submit(int).result()
    except RuntimeError:
        return False
    return True


def _save_elsewhere(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Saves in a new Python process, which gets the arrays through a pipe."""
    described = {name: [array.dtype.name, list(array.shape)] for name, array in arrays.items()}
    log = path.parent.parent / "save.log"
    try:
        with open(log, "w+b") as said:
            process = subprocess.Popen(
                children.command("kvgraft_jax.grafting.orbax_arrays", str(path)),
                env=children.environment(JAX_PLATFORMS="cpu"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            with process, contextlib.suppress(BrokenPipeError):  # Its exit code says that it failed.
                process.stdin.write(json.dumps(described).encode() + b"\n")
                for array in arrays.values():
                    process.stdin.write(digest.array_bytes(array))
                process.stdin.flush()
                process.wait()  # The pipe stays open until then: at its end the process ends, too.
            said.seek(max(0, said.tell() - _LAST_WORDS))
            words = said.read().decode(errors="replace").strip()
    except (OSError, RuntimeError) as error:
        raise errors.StorageError(
            f"{path}: Orbax cannot save in this process ({_reason()}), and a process for it could not be started: "
            f"{type(error).__name__}: {error}. Save from the main process, or start workers with multiprocessing's "
            "'spawn' method"
        ) from error
    for kind, code in _EXIT_CODES.items():
        if process.returncode == code:
            raise kind(words)
    if process.returncode < 0:
        raise errors.ResourceError(
            f"{path}: signal {-process.returncode} ended the process that saves, as happens where threads or memory "
            f"run out; end other programs or raise the limit. {words}"
        )
    if process.returncode:
        raise RuntimeError(f"{path}: the process that saves ended with {process.returncode}: {words}")


def _reason() -> str:
    if forks.is_forked():
        return "it was forked"
    if jax.distributed.is_initialized():
        return "it is one of a jax.distributed job"
    return "it is ending, or no thread can be started"


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Lets in one thread at a time; plain files, one chunk per array, no extras.

    Orbax's log is held back meanwhile: it warns on every save that this layout has nothing to merge, and prints the
    traces of errors that are raised here anyway.
    """
    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt = False
    saving.use_zarr3 = False
    saving.use_compression = False
    saving.enable_write_sharding_file = False
    saving.enable_post_merge_validation = False
    saving.array_metadata_store = None
    context.memory.deepcopy_host_arrays = False  # The arrays of an artifact are read-only.
    logger = logging.getLogger("absl")
    with _LOCK:
        logger.addFilter(_is_not_from_orbax)
        try:
            with context:
                yield
        finally:
            logger.removeFilter(_is_not_from_orbax)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def main() -> None:
    """Saves the arrays that stdin describes and holds, at the path that the command line names."""
    try:
        described = json.loads(sys.stdin.buffer.readline())
        arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in described.items()}
        for name, array in arrays.items():
            if sys.stdin.buffer.readinto(digest.array_bytes(array)) != array.nbytes:
                sys.exit(f"{name}: ends early")
        threading.Thread(target=_end_with_parent, daemon=True).start()
        _save_here(pathlib.Path(sys.argv[1]), arrays)
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not device_memory.is_want(error):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(_EXIT_CODES[MemoryError if device_memory.is_want(error) else OSError])


def _end_with_parent() -> None:
    """Ends this process when its parent has ended, so that it writes nothing into a directory that others sweep."""
    os.read(sys.stdin.fileno(), 1)  # Not through the buffer, whose lock Python needs at its end.
    os._exit(1)


if __name__ == "__main__":
    main()
