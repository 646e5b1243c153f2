"""What nbval cannot see in the committed notebooks."""

import re
from pathlib import Path

import nbformat
import pytest
from kvshot_book.refresh import figures

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def code_cells(path: Path) -> list:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


@notebook
def test_outputs_are_those_of_one_run_from_top_to_bottom(path):
    """nbval compares nothing in a cell whose outputs were stripped."""
    cells = code_cells(path)
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    outputs = [o for c in cells for o in c.outputs]
    assert any("text/plain" in o.get("data", {}) or o.get("text") for o in outputs)
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


@notebook
def test_metadata_is_portable(path):
    metadata = nbformat.read(path, as_version=4).metadata
    assert metadata.kernelspec.name == "python3"
    assert not {"papermill", "widgets"} & set(metadata)


@notebook
def test_first_cell_holds_the_parameters(path):
    tagged = [i for i, c in enumerate(code_cells(path)) if "parameters" in c.metadata.get("tags", [])]
    assert tagged == [0]


@notebook
def test_no_cell_that_can_fail_unseen(path):
    """nbval passes a failing shell command, and a cell tagged raises-exception that raises nothing."""
    for cell in code_cells(path):
        assert not re.search(r"^\s*(!|%%?(bash|sh|pip|time|timeit)\b)", cell.source, re.M)
        assert "raises-exception" not in cell.metadata.get("tags", [])


@notebook
def test_code_fits_a_page(path):
    long = [line for c in code_cells(path) for line in c.source.splitlines() if len(line) > 75]
    assert long == []


@notebook
def test_no_name_is_glued_twice(path):
    names = [o.metadata["scrapbook"]["name"] for c in code_cells(path) for o in c.outputs
             if "scrapbook" in o.get("metadata", {})]
    assert len(names) == len(set(names))


def test_figures_shown_elsewhere_are_those_of_the_notebooks():
    static = Path(__file__).resolve().parents[2] / "book" / "_static"
    kept = {name: png for path in NOTEBOOKS for name, png in figures(nbformat.read(path, 4))}
    assert kept == {path.stem: path.read_bytes() for path in static.glob("*.png")}
