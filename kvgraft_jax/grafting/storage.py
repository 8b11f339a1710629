"""Storage: an artifact on disk, as DIRECTORY/<artifact id>/ with a manifest, an Orbax checkpoint and a seal.

The arrays lie uncompressed, one stacked array per shape class, so what a manifest declares is compared with the bytes
on disk before anything is allocated. Orbax does not check content, so every leaf is hashed here. Only proof of damage
is called damage: a system that is out of memory, threads or file handles says nothing about an entry.
"""

from __future__ import annotations

import errno
import os
import pathlib

from kvgraft_jax import digest, errors, paths
from kvgraft_jax.grafting import artifact as artifact_lib
from kvgraft_jax.grafting import container, orbax_arrays
from kvgraft_jax.grafting import manifest as manifest_lib

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 24
_ARRAYS = "arrays"
_MAX_NOTE_BYTES = 1 << 20
_MAX_ZARRAY_BYTES = 1 << 16
_REMEDIES = {
    errno.EMFILE: "Close files, or raise the limit of open files (ulimit -n).",
    errno.ENFILE: "The system has too many open files; end other programs.",
    errno.EACCES: "Make it writable or choose another directory.",
    errno.EPERM: "Make it writable or choose another directory.",
    errno.EROFS: "It cannot be written to; choose another directory.",
}
_OTHER_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


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
      InputError: not an artifact, or a directory that cannot be used (see `paths.absolute` and `paths.check_plain`).
      StorageError: it could not be written, or an earlier entry of that id not be read; nothing of it is left, and
        earlier entries are as they were.
      ResourceError: out of memory, threads or processes; likewise.
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
    except MemoryError as error:
        raise _out_of_memory(f"saving artifact {artifact_id}") from error
    except (errors.IntegrityError, OSError) as error:
        raise errors.StorageError(
            f"artifact {artifact_id} ({artifact.nbytes:,} bytes) could not be written to {place.parent}; nothing of it "
            f"is left there. {_REMEDIES.get(getattr(error, 'errno', None), 'Free space or choose another directory.')} "
            f"{type(error).__name__}: {str(error)[:400]}"
        ) from error
    return artifact_id


def load_artifact(directory: str | os.PathLike[str], artifact_id: str) -> artifact_lib.Artifact:
    """Loads an artifact after checking every byte of it.

    Exact: the arrays have the bits that were deposited, or an error is raised.

    Args:
      directory: where it was deposited, or a copy of that.
      artifact_id: 64 lower-case hexadecimal digits.

    Raises:
      InputError: `artifact_id` is not written like one, or `directory` cannot be used; the disk was not touched.
      ArtifactNotFound: no such entry.
      IntegrityError: names the file, manifest field or array (and leaf) that is not what was deposited.
      StorageError: the entry could not be read: no permission, a failing disk, too many open files.
      ResourceError: out of memory.
    """
    if isinstance(directory, artifact_lib.Artifact) or isinstance(artifact_id, artifact_lib.Artifact):
        raise errors.InputError(
            "load_artifact(directory, artifact_id): got an Artifact, which is loaded already; engine.graft(artifact) "
            "grafts it, and artifact.artifact_id is its id"
        )
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
    """Lists the ids of the entries in a directory, sorted; not checked. Empty if there is no such directory.

    Raises:
      InputError: `directory` cannot be used.
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


def _out_of_memory(doing: str) -> errors.ResourceError:
    return errors.ResourceError(
        f"{doing}: out of memory, which says nothing about the entry; end other programs or raise the limit"
    )


def _write(entry: pathlib.Path, artifact: artifact_lib.Artifact) -> None:
    (entry / _MANIFEST).write_bytes(digest.canonical_json(artifact.manifest))
    stacks = {stack.kind: stack.kv_Lx2xSxKxH for stack in artifact.stacks}
    orbax_arrays.save(entry / _ARRAYS, {"token_ids": artifact.token_ids_S, "logits": artifact.logits_V, **stacks})


def _read(entry: pathlib.Path, artifact_id: str) -> artifact_lib.Artifact:
    """Reads and checks an entry wherever it stands.

    Whatever is wrong with it is an `IntegrityError`; what keeps it from being read says nothing about it.
    """
    manifests: list[manifest_lib.Manifest] = []

    def check_sizes(sizes: dict[str, int]) -> None:
        """Checks the manifest by the id that follows from it, and every other file by the size that it implies."""
        if not sizes.get(_MANIFEST, 0) <= _MAX_MANIFEST_BYTES:
            raise errors.IntegrityError(artifact_id, _MANIFEST, f"larger than {_MAX_MANIFEST_BYTES} bytes")
        manifests.append(manifest_lib.read((entry / _MANIFEST).read_bytes(), artifact_id))
        _check_layout(entry, manifests[0], sizes)

    try:
        container.verify(entry, artifact_id, check_sizes)
        (manifest,) = manifests
        return _artifact(manifest, entry / _ARRAYS)
    except MemoryError as error:
        raise _out_of_memory(f"artifact {artifact_id}") from error
    except _OTHER_FILES as error:
        raise errors.IntegrityError(artifact_id, str(entry), f"{type(error).__name__}: {error}") from error
    except OSError as error:
        raise _unreadable(entry, error) from error


def _check_layout(entry: pathlib.Path, manifest: manifest_lib.Manifest, sizes: dict[str, int]) -> None:
    """Compares the files of an entry, and what Orbax noted about each array, with what the manifest implies."""
    artifact_id = manifest.artifact_id
    wanted_bytes: dict[str, int | None] = {_MANIFEST: None}
    wanted_bytes |= {f"{_ARRAYS}/{note}": None for note in orbax_arrays.NOTES}
    for name, array in manifest.arrays.items():
        described, chunk = (f"{_ARRAYS}/{file}" for file in orbax_arrays.files_of(name, len(array.shape)))
        if not 0 < sizes.get(described, 0) <= _MAX_ZARRAY_BYTES:
            raise errors.IntegrityError(
                artifact_id, described, f"missing, empty or larger than {_MAX_ZARRAY_BYTES} bytes"
            )
        try:
            problem = orbax_arrays.difference((entry / described).read_bytes(), array.dtype, array.shape)
        except ValueError as error:
            raise errors.IntegrityError(artifact_id, described, str(error)) from None
        if problem:
            raise errors.IntegrityError(artifact_id, name, problem)
        wanted_bytes |= {described: None, chunk: array.nbytes}
        if sizes.get(chunk) != array.nbytes:
            raise errors.IntegrityError(
                artifact_id, name, f"{sizes.get(chunk, 0)} bytes on disk, wanted {array.nbytes} for shape {array.shape}"
            )
    for path, size in sizes.items():
        if path not in wanted_bytes:
            raise errors.IntegrityError(artifact_id, path, container.foreign(entry / path))
        if wanted_bytes[path] is None and path != _MANIFEST and size > _MAX_NOTE_BYTES:
            raise errors.IntegrityError(artifact_id, path, f"{size} bytes, wanted at most {_MAX_NOTE_BYTES}")


def _artifact(manifest: manifest_lib.Manifest, checkpoint: pathlib.Path) -> artifact_lib.Artifact:
    try:
        arrays = {
            name: orbax_arrays.read(checkpoint, name, entry.dtype, entry.shape)
            for name, entry in manifest.arrays.items()
        }
        artifact = artifact_lib.Artifact(
            policy=manifest.policy,
            token_ids=arrays["token_ids"],
            stacks=tuple(
                artifact_lib.KVStack(stack.kind, stack.layers, stack.start, arrays[stack.kind])
                for stack in manifest.stacks
            ),
            logits_V=arrays["logits"],
            pin=manifest.pin,
            provenance=manifest.provenance,
        )
    except (EOFError, errors.InputError, errors.CaptureError) as error:  # What no capture can have made.
        raise errors.IntegrityError(manifest.artifact_id, "arrays", str(error)) from error
    for name, entry in artifact.description.arrays.items():
        wanted = manifest.arrays[name].leaves
        damaged = [i for i, leaf in enumerate(entry.leaves) if leaf != wanted[i]]
        if damaged:
            raise errors.IntegrityError(
                manifest.artifact_id, name, f"leaf {damaged[0]} of {len(wanted)} has another SHA-256 than deposited"
            )
    return artifact
