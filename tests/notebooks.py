"""Running a notebook from top to bottom in this interpreter, and reading what its cells printed."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parents[1] / "experiments" / "colabs"


def read(name: str) -> nbformat.NotebookNode:
    """Returns a notebook of the project."""
    return nbformat.read(FOLDER / name, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Its cells of code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_bare(notebook: nbformat.NotebookNode) -> bool:
    """Returns whether it has code and no outputs."""
    cells = code_cells(notebook)
    return bool(cells) and all(cell.outputs == [] and cell.execution_count is None for cell in cells)


def execute(name: str, scratch: pathlib.Path) -> nbformat.NotebookNode:
    """Runs a notebook and returns it with its outputs; raises if a cell does.

    Args:
      name: file name.
      scratch: folder for a description of this interpreter, and for what the notebook writes.
    """
    spec = scratch / "kernels" / "this-python" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    environment = {"TMPDIR": str(scratch)}
    spec.write_text(
        json.dumps({"argv": command, "display_name": "this Python", "language": "python", "env": environment})
    )
    notebook = read(name)
    before = os.environ.get("JUPYTER_PATH")
    os.environ["JUPYTER_PATH"] = str(scratch)
    try:
        nbclient.NotebookClient(
            notebook, kernel_name="this-python", timeout=600, resources={"metadata": {"path": str(FOLDER)}}
        ).execute()
    finally:
        if before is None:
            del os.environ["JUPYTER_PATH"]
        else:
            os.environ["JUPYTER_PATH"] = before
    return notebook


def printed(cell: nbformat.NotebookNode) -> str:
    """Returns what a cell wrote to stdout."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def num_plots(cell: nbformat.NotebookNode) -> int:
    """Returns how many images a cell shows."""
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)
