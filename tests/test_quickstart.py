"""The quickstart notebook: it holds no outputs, and runs from top to bottom on the real model in this interpreter."""

from __future__ import annotations

import json
import pathlib
import sys

import nbclient
import nbformat
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[1] / "experiments" / "colabs" / "quickstart.ipynb"


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_it_is_stored_without_outputs():
    cells = _code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)


@pytest.mark.weights
@pytest.mark.slow
def test_it_runs_and_ends_in_equality(tmp_path, monkeypatch):
    spec = tmp_path / "kernels" / "this-python" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": command, "display_name": "this Python", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="this-python",
        timeout=600,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    )
    client.execute()
    cells = _code_cells(notebook)
    text = {cell.source.partition("\n")[0]: _printed(cell) for cell in cells}
    comparison = _printed(cells[-1])
    assert comparison.splitlines()[-1] == "equal" and "DIFFERENT" not in comparison
    assert text["artifact = kg.load_artifact(directory, artifact_id)"].startswith("60}")
    assert "width" in text["try:"]
