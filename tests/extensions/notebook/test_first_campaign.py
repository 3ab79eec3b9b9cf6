"""The notebooks of the documentation run, as a reader runs them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.processes import MARK

if TYPE_CHECKING:
    import nbformat  # compiles the grammars of its validator for 1 s when it is imported, so the tests do that

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def outputs_of(book: nbformat.NotebookNode) -> list[str]:
    """Return the plain text of the outputs of each code cell."""
    return [
        "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)
        for cell in book.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.cluster
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("event_loop_closed")
def test_a_notebook_of_the_docs_runs(path, tmp_path, monkeypatch, mark):
    """All training jobs finish, and the table, the logs and the picture are there."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv(MARK, mark)
    # The limit is that of one cell, which waits for a whole campaign: 290 s where ten other processes share two cores.
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = outputs_of(book)
    assert "digits: finished, 3 of 3 training jobs finished" in outputs[1]
    assert outputs[3] == "'finished'"
    assert outputs[4].count("finished") == 3
    assert "finished at step" in outputs[5]
    assert any("image/png" in output.get("data", {}) for output in book.cells[-2].outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_of_the_docs_is_saved_with_its_outputs_and_without_widgets(path):
    """It reads well where nothing can run, and names no directory of the machine that wrote it."""
    import nbformat

    text = path.read_text(encoding="utf-8")
    book = nbformat.reads(text, as_version=4)
    nbformat.validate(book)
    assert "widget" not in text
    assert "/tmp" not in text
    assert all(outputs_of(book)[1:])
    assert not any(output.output_type == "error" for cell in book.cells for output in cell.get("outputs", []))
    assert len(text) < 300_000


def test_there_is_a_notebook():
    """The how-to links to it."""
    assert [path.name for path in NOTEBOOKS] == ["first-campaign.ipynb"]
    assert "../notebooks/first-campaign.ipynb" in (ROOT / "docs" / "howto" / "notebooks.md").read_text(encoding="utf-8")
