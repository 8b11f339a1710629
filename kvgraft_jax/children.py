"""Says how this package starts processes of its own: which Python, which modules, which environment."""

from __future__ import annotations

import os
import pathlib
import sys


def command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this package; the working directory has no part in what it imports."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment, with its own search path of modules and some variables changed."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [os.path.abspath(folder) for folder in (*given, *sys.path) if folder]
    root = str(pathlib.Path(__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys([*folders, root]))} | changes
