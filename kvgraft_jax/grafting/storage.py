"""Storage: an artifact on disk, as DIRECTORY/<artifact id>/ with a manifest, an Orbax checkpoint and a seal.

The arrays lie uncompressed, one stacked array per shape class, so what a manifest declares is compared with the bytes
on disk before anything is allocated. Orbax checks no content and casts without a word, so every leaf is hashed here.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import logging
import os
import pathlib
import threading

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np
from orbax.checkpoint import v1 as ocp

from kvgraft_jax import digest, errors, paths
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import container
from kvgraft_jax.grafting import manifest as manifest_lib

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 24
_ARRAYS = "arrays"
_STATE = "state"
_ZARRAY = ".zarray"
_MAX_NOTE_BYTES = 1 << 20
_MAX_ZARRAY_BYTES = 1 << 16
_ORBAX = threading.Lock()  # A save waits for signals under the number of the latest save or load in the process.
_OTHER_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_ZARR_DTYPES = {"bfloat16": "bfloat16", "float32": "<f4", "int32": "<i4"}


def save_artifact(artifact: artifact_lib.Artifact, directory: str | os.PathLike[str]) -> str:
    """Deposits an artifact: written beside its place, read back and compared, then put there in one rename.

    Exact: what `load_artifact` gives is equal bit for bit. An intact entry of the same id is kept, a damaged one is
    replaced. Any number of processes may deposit and read at once; a reader sees the entry whole or not at all.

    Args:
      artifact: what to deposit.
      directory: made if it is not there.

    Returns:
      The artifact id, under which it can be loaded.

    Raises:
      InputError: `directory` is no path that can be used (see `paths.absolute` and `paths.check_plain`).
      StorageError: it could not be written, or an earlier entry of that id not be read; nothing of it is left, and
        earlier entries are as they were.
    """
    if not isinstance(artifact, artifact_lib.Artifact):
        raise errors.InputError(f"artifact: {errors.mistaken(artifact, 'Artifact')}")
    artifact_id = artifact.artifact_id
    place = _directory(directory) / artifact_id
    if _is_intact(place):
        return artifact_id
    try:
        with container.writing(place.parent) as entry:
            _write(entry, artifact)
            container.seal(entry, artifact_id)
            _read(entry, artifact_id)
            container.publish(entry, place, lambda: _is_intact(place))
    except (errors.StorageError, MemoryError):
        raise
    except Exception as error:
        raise errors.StorageError(
            f"artifact {artifact_id} ({artifact.nbytes:,} bytes) could not be written to {place.parent}; nothing of it "
            f"is left there. Make room or choose another directory. {type(error).__name__}: {str(error)[:400]}"
        ) from error
    return artifact_id


def load_artifact(directory: str | os.PathLike[str], artifact_id: str) -> artifact_lib.Artifact:
    """Loads an artifact after checking every byte of it.

    Exact: the arrays have the bits that were deposited, or an error is raised.

    Args:
      directory: where it was deposited, or a copy of that.
      artifact_id: 64 lower-case hexadecimal digits.

    Raises:
      InputError: `artifact_id` is not written like one, or `directory` is no path; the disk was not touched.
      ArtifactNotFound: no such entry.
      IntegrityError: names the file, manifest field or array (and leaf) that is not what was deposited.
      StorageError: the entry could not be read: no permission, a failing disk, too many open files.
    """
    if not manifest_lib.is_id(artifact_id):
        raise errors.InputError(f"artifact id: got {artifact_id!r}, wanted 64 lower-case hexadecimal digits")
    place = _directory(directory) / artifact_id
    try:
        return _read(place, artifact_id)
    except errors.IntegrityError:
        if os.path.lexists(place):
            raise
    raise errors.ArtifactNotFound(
        f"artifact {artifact_id}: not in {place.parent}, which holds {len(list_artifacts(directory))} artifact(s)"
    )


def list_artifacts(directory: str | os.PathLike[str]) -> tuple[str, ...]:
    """Ids of the entries in a directory, sorted; not checked. Empty if there is no such directory.

    Raises:
      InputError: `directory` is no path that can be used.
      StorageError: the directory could not be read.
    """
    place = _directory(directory)
    try:
        names = os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise _unreadable(place, error) from error
    return tuple(sorted(filter(manifest_lib.is_id, names)))


def _directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the place that a caller means, if Orbax can use it."""
    place = paths.absolute(directory, "directory")
    paths.check_plain(place, "directory")
    return place


def _is_intact(place: pathlib.Path) -> bool:
    try:
        _read(place, place.name)
    except errors.IntegrityError:
        return False
    return True


def _unreadable(path: str | os.PathLike[str], error: OSError) -> errors.StorageError:
    return errors.StorageError(
        f"{path} could not be read, which says nothing about what is in it. Make it readable and try again. "
        f"{type(error).__name__}: {error}"
    )


def _write(entry: pathlib.Path, artifact: artifact_lib.Artifact) -> None:
    (entry / _MANIFEST).write_bytes(digest.canonical_json(artifact.manifest))
    stacks = {stack.kind: stack.kv_Lx2xSxKxH for stack in artifact.stacks}
    with _orbax():
        ocp.save(
            entry / _ARRAYS,
            {"token_ids": artifact.token_ids_S, "logits": artifact.logits_V, **stacks},
            checkpointable_name=_STATE,
        )
    (entry / _ARRAYS / "commit_success.txt").unlink()  # Names a path of this machine; the rename is the commit.


def _read(entry: pathlib.Path, artifact_id: str) -> artifact_lib.Artifact:
    """Reads and checks an entry wherever it stands.

    Whatever is wrong with it is an `IntegrityError`; what keeps it from being read says nothing about it.
    """
    manifests: list[manifest_lib.Manifest] = []

    def check_sizes(sizes: dict[str, int]) -> None:
        """The manifest proves itself by the id that follows from it; the other files must have the sizes it implies."""
        if not sizes.get(_MANIFEST, 0) <= _MAX_MANIFEST_BYTES:
            raise errors.IntegrityError(artifact_id, _MANIFEST, f"larger than {_MAX_MANIFEST_BYTES} bytes")
        manifests.append(manifest_lib.read((entry / _MANIFEST).read_bytes(), artifact_id))
        _check_layout(entry, manifests[0], sizes)

    try:
        container.verify(entry, artifact_id, check_sizes)
        (manifest,) = manifests
        return _artifact(manifest, _load_arrays(entry / _ARRAYS, manifest))
    except (errors.IntegrityError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, _OTHER_FILES):
            raise _unreadable(entry, error) from error
        raise errors.IntegrityError(artifact_id, str(entry), f"{type(error).__name__}: {error}") from error


def _check_layout(entry: pathlib.Path, manifest: manifest_lib.Manifest, sizes: dict[str, int]) -> None:
    """Compares what Orbax noted about each array, and the bytes that it has on disk, with what the manifest says."""
    for name, array in manifest.arrays.items():
        folder = f"{_ARRAYS}/{_STATE}/{name}/"
        if not 0 < sizes.get(folder + _ZARRAY, 0) <= _MAX_ZARRAY_BYTES:
            raise errors.IntegrityError(
                manifest.artifact_id, folder + _ZARRAY, f"missing, empty or larger than {_MAX_ZARRAY_BYTES} bytes"
            )
        noted = digest.parse_json((entry / folder / _ZARRAY).read_bytes())
        wanted = {
            "shape": list(array.shape),
            "chunks": list(array.shape),
            "dtype": _ZARR_DTYPES[array.dtype],
            "order": "C",
            "compressor": None,
            "filters": None,
        }
        for field, value in wanted.items():
            if field not in noted or noted[field] != value:
                raise errors.IntegrityError(
                    manifest.artifact_id, name, f"stored with {field} {noted.get(field)!r}, wanted {value!r}"
                )
        stored = sum(size for path, size in sizes.items() if path.startswith(folder) and path != folder + _ZARRAY)
        if stored != array.nbytes:
            raise errors.IntegrityError(
                manifest.artifact_id, name, f"{stored} bytes on disk, wanted {array.nbytes} for shape {array.shape}"
            )
    of_arrays = tuple(f"{_ARRAYS}/{_STATE}/{name}/" for name in manifest.arrays)
    for path, size in sizes.items():
        if path != _MANIFEST and not path.startswith(of_arrays) and size > _MAX_NOTE_BYTES:
            raise errors.IntegrityError(manifest.artifact_id, path, f"{size} bytes, wanted at most {_MAX_NOTE_BYTES}")


def _load_arrays(path: pathlib.Path, manifest: manifest_lib.Manifest) -> dict[str, np.ndarray]:
    """Loads the arrays to the host; a template of NumPy arrays keeps Orbax from the devices that they came from."""
    template = {name: np.broadcast_to(np.zeros((), a.dtype), a.shape) for name, a in manifest.arrays.items()}
    with _orbax():
        return ocp.load(path, template, checkpointable_name=_STATE)


def _artifact(manifest: manifest_lib.Manifest, arrays: dict[str, np.ndarray]) -> artifact_lib.Artifact:
    artifact = artifact_lib.Artifact(
        policy=manifest.policy,
        token_ids=arrays["token_ids"],
        stacks=tuple(
            artifact_lib.KVStack(stack.kind, stack.layers, stack.start, arrays[stack.kind]) for stack in manifest.stacks
        ),
        logits_V=arrays["logits"],
        pin=manifest.pin,
        provenance=manifest.provenance,
    )
    for name, entry in artifact.description.arrays.items():
        wanted = manifest.arrays[name].leaves
        damaged = [i for i, leaf in enumerate(entry.leaves) if leaf != wanted[i]]
        if damaged:
            raise errors.IntegrityError(
                manifest.artifact_id, name, f"leaf {damaged[0]} of {len(wanted)} has another SHA-256 than deposited"
            )
    return artifact


@contextlib.contextmanager
def _orbax() -> Iterator[None]:
    """One thread at a time; plain files, one chunk per array, no extras.

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
    with _ORBAX:
        logger.addFilter(_is_not_from_orbax)
        try:
            with context:
                yield
        finally:
            logger.removeFilter(_is_not_from_orbax)


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname
