"""The quickstart notebook: it holds no outputs, and runs from top to bottom on the real model in this interpreter."""

from __future__ import annotations

import pytest

from tests import notebooks

NAME = "quickstart.ipynb"


def test_it_is_stored_without_outputs():
    assert notebooks.is_bare(notebooks.read(NAME))


@pytest.mark.weights
@pytest.mark.slow
def test_it_runs_and_ends_in_equality(tmp_path):
    cells = notebooks.code_cells(notebooks.execute(NAME, tmp_path))
    text = {cell.source.partition("\n")[0]: notebooks.printed(cell) for cell in cells}
    comparison = notebooks.printed(cells[-1])
    assert comparison.splitlines()[-1] == "equal" and "DIFFERENT" not in comparison
    assert text["artifact = kg.load_artifact(directory, artifact_id)"].startswith("60}")
    streamed = text["stream, state = model.tokenizer.stream(), asked"]
    assert streamed.rstrip("\n") == text["artifact = kg.load_artifact(directory, artifact_id)"].rstrip("\n")
    engines = text["narrow = kg.Engine(model, capacity=4096, shapes=(2,))"]
    assert engines.startswith("pins equal: True  contexts equal: True\n") and "kv_block" in engines
    assert text["prefix_ids, suffix_ids = model.chat.split(text, query)"].startswith("plain 60}")
