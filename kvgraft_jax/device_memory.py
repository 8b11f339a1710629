"""Tells, before anything is loaded or allocated, whether a device has the memory for it."""

from __future__ import annotations

from collections.abc import Iterable
import errno
import os
import pathlib
import resource
import sys

import jax
import psutil

from kvgraft_jax import errors

_PROCESS_GROUPS = pathlib.Path("/proc/self/cgroup")
_GROUPS = pathlib.Path("/sys/fs/cgroup")
# Limit, use, and what of the use can be taken back at any time, in either version of control groups.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

# Address space that threads (their stacks and the C library's arenas) and compiled programs take beside arrays.
_RESERVE = 1 << 27
_WANT = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
# As the libraries below say it, in errors of any type.
_SIGNS = ("can't start new thread", "RESOURCE_EXHAUSTED", "Out of memory", "bad_alloc", *map(os.strerror, _WANT))


def check(model: str, needed: int, devices: Iterable[jax.Device], purpose: str, remedy: str) -> None:
    """Raises `ResourceError` unless each of `devices` has `needed` bytes free.

    Args:
      model: whose memory it is, for the message.
      needed: bytes on every device.
      devices: devices; one that does not tell its memory is taken to have enough. CPU devices share the host's.
      purpose: what the bytes are for, for the message.
      remedy: what to use instead, for the message.
    """
    devices = list(devices)
    needed *= sum(device.platform == "cpu" for device in devices) or 1
    for device in devices:
        present = available(device)
        if present is not None and needed > present:
            raise errors.ResourceError(
                f"{model}: needs {needed} bytes ({needed / 1e9:.1f} GB) for {purpose}, but {device} has "
                f"{present} free ({present / 1e9:.1f} GB); use {remedy} or dtype='bfloat16', spread it over "
                "more devices, or end other programs"
            )


def available(device: jax.Device) -> int | None:
    """Returns the free bytes of a device, or None where it does not tell.

    Of the host: what neither it, a container nor a limit of the process (`ulimit -v`, `ulimit -d`) denies.
    """
    if device.platform == "cpu":
        return min([psutil.virtual_memory().available, *group_free_bytes(_PROCESS_GROUPS, _GROUPS), *_process_limits()])
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats or "bytes_in_use" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def is_want(error: BaseException) -> bool:
    """Tells whether an error says that memory, threads or file handles ran out, which proves nothing about a file."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _WANT
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _SIGNS)


def _process_limits() -> list[int]:
    """Returns the bytes that each limit of the process still allows, less what threads and programs take."""
    if sys.platform != "linux":
        return []
    used = psutil.Process().memory_info()
    limits = ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, used.data))
    soft = [(resource.getrlimit(kind)[0], present) for kind, present in limits]
    return [max(0, most - present - _RESERVE) for most, present in soft if most != resource.RLIM_INFINITY]


def group_free_bytes(process_groups: pathlib.Path, root: pathlib.Path) -> list[int]:
    """Returns the bytes that each control group of a process still allows; empty without groups or limits.

    Args:
      process_groups: a file like /proc/self/cgroup.
      root: where the groups are mounted, as /sys/fs/cgroup.
    """
    free = []
    for line in _read(process_groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            free += [left for names in _FILES if (left := _free_bytes(group, *names)) is not None]
            if group == top:
                break
            group = group.parent
    return free


def _free_bytes(group: pathlib.Path, limit_file: str, use_file: str, reclaimable: str) -> int | None:
    limit, use = _read(group / limit_file).strip(), _read(group / use_file).strip()
    if not limit.isdecimal() or not use.isdecimal():
        return None
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    return int(limit) - int(use) + int(stat.get(reclaimable, "0"))


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
