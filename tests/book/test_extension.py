"""The extension that runs the book's notebooks: what is stale, what fails, what a page depends on."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from kvshot_book import refresh
from kvshot_book.execute import execute, update_notebooks
from kvshot_book.kernel import NOTEBOOK_METADATA
from kvshot_book.plan import load_plan, page_digest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kvshot.errors import KvshotError

ROOT = Path(__file__).resolve().parents[2]
TOC = {
    "format": "jb-book", "root": "intro", "parts": [
        {"caption": "Chapters", "numbered": True, "chapters": [{"file": "notebooks/one"}, {"file": "prose"}]},
        {"caption": "Reference", "numbered": True, "chapters": [{"file": "bibliography"}]},
    ],
}
CELLS = ["scale = 2", "import json\nvalue = scale * json.load(open('../results/a.json'))\nprint(value)"]


@pytest.fixture(autouse=True)
def restore_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())


def write_notebook(path: Path, cells: list[str], *markdown: str) -> None:
    notebook = new_notebook(metadata=NOTEBOOK_METADATA)
    notebook.cells = [new_code_cell(c) for c in cells] + [new_markdown_cell(m) for m in markdown]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    path.write_text(nbformat.writes(notebook), encoding="utf8")


def write_plan(root: Path, *entries: dict) -> None:
    (root / "notebooks/book.yml").write_text(yaml.safe_dump(list(entries)), encoding="utf8")


@pytest.fixture
def project(tmp_path):
    """A small repository with one notebook that reads one record."""
    for folder in ("book", "notebooks", "results", "kvshot"):
        (tmp_path / folder).mkdir()
    (tmp_path / "results/a.json").write_text("21")
    (tmp_path / "results/b.json").write_text("1")
    (tmp_path / "kvshot/library.py").write_text("x = 1\n")
    write_notebook(tmp_path / "notebooks/one.ipynb", CELLS)
    write_plan(tmp_path, {"notebook": "one.ipynb"})
    return tmp_path


def digest(root: Path) -> str:
    return page_digest(load_plan(root)[0], root)


def printed(root: Path) -> str:
    notebook = nbformat.read(root / "book/notebooks/one.ipynb", as_version=4)
    return "".join(o.text for c in notebook.cells if c.cell_type == "code" for o in c.outputs)


@pytest.mark.parametrize("change", [
    lambda root: (root / "results/a.json").write_text("22"),
    lambda root: (root / "results/c.json").write_text("22"),
    lambda root: (root / "results/b.json").unlink(),
    lambda root: (root / "kvshot/library.py").write_text("x = 2\n"),
    lambda root: write_plan(root, {"notebook": "one.ipynb", "parameters": {"scale": 3}}),
    lambda root: write_notebook(root / "notebooks/one.ipynb", [CELLS[0], CELLS[1] + "\n1"]),
], ids=["record", "new record", "record gone", "library", "parameters", "cell"])
def test_a_changed_input_changes_the_digest(project, change):
    before = digest(project)
    assert digest(project) == before
    change(project)
    assert digest(project) != before


def test_a_package_version_changes_the_digest(project, monkeypatch):
    before = digest(project)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    assert digest(project) != before


def test_outputs_and_unread_records_do_not_change_the_digest(project):
    write_plan(project, {"notebook": "one.ipynb", "reads": ["results/a.json"]})
    before = digest(project)
    (project / "results/b.json").write_text("2")
    path = project / "notebooks/one.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].execution_count = 7
    nbformat.write(notebook, path)
    assert digest(project) == before


@pytest.mark.parametrize("entry, message", [
    ({"notebook": "two.ipynb"}, "two.ipynb"),
    ({"notebook": "one.ipynb", "parameter": {}}, "keys"),
    ({"notebook": "one.ipynb", "reads": ["results/typo*.json"]}, "typo"),
])
def test_a_plan_that_cannot_be_meant_is_refused(project, entry, message):
    write_plan(project, entry)
    with pytest.raises(KvshotError, match=message):
        load_plan(project)


def test_runs_what_is_stale_and_nothing_else(project):
    assert update_notebooks(project / "book", project) == ["one"]
    assert printed(project) == "42\n"
    assert update_notebooks(project / "book", project) == []
    (project / "results/a.json").write_text("50")
    write_plan(project, {"notebook": "one.ipynb", "parameters": {"scale": 3}})
    stray = project / "book/notebooks/gone.ipynb"
    stray.write_text("{}")
    assert update_notebooks(project / "book", project) == ["one"]
    assert printed(project) == "150\n"
    assert not stray.exists()
    assert str(project) not in (project / "book/notebooks/one.ipynb").read_text()


def test_a_failing_cell_is_reported_and_leaves_no_page(project):
    cells = [CELLS[0], "ok = 1", "raise ValueError('broken on purpose')"]
    write_notebook(project / "notebooks/one.ipynb", cells)
    write_plan(project, {"notebook": "one.ipynb", "parameters": {"scale": 3}})
    with pytest.raises(KvshotError) as caught:
        update_notebooks(project / "book", project)
    message = str(caught.value)
    for part in ("notebooks/one.ipynb", "cell 3 of 3", "ValueError: broken on purpose", "scale"):
        assert part in message
    assert list((project / "book/notebooks").iterdir()) == []
    assert (project / "_build/failed/one.ipynb").is_file()


def test_an_unknown_parameter_is_refused(project):
    write_plan(project, {"notebook": "one.ipynb", "parameters": {"scael": 3}})
    (page,) = load_plan(project)
    with pytest.raises(KvshotError, match="scael"):
        execute(page, project / "book/one.ipynb", "digest", project)


def test_refresh_twice_leaves_no_difference(project):
    path = project / "notebooks/one.ipynb"
    refresh.main(["one"], project)
    first = path.read_bytes()
    assert json.loads(first)["cells"][1]["outputs"][0]["text"] == ["42\n"]
    refresh.main([], project)
    assert path.read_bytes() == first
    with pytest.raises(KvshotError, match="two"):
        refresh.main(["two"], project)


def test_refresh_keeps_the_figures_that_are_wanted_elsewhere(project):
    draw = "import matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nplt.close(fig)\nfig"
    path = project / "notebooks/one.ipynb"
    write_notebook(path, ["scale = 2", draw])
    notebook = nbformat.read(path, 4)
    notebook.cells[1].metadata["kvshot"] = {"figure": "curve"}
    nbformat.write(notebook, path)
    refresh.main(["one"], project)
    assert (project / "book/_static/curve.png").read_bytes().startswith(b"\x89PNG")
    notebook.cells[1].source = "1"
    nbformat.write(notebook, path)
    with pytest.raises(KvshotError, match="curve shows 0 images"):
        refresh.main(["one"], project)


@pytest.fixture
def book(tmp_path):
    """This repository's own book settings around one small notebook and one page that pastes its number."""
    shutil.copytree(ROOT / "book/_ext", tmp_path / "book/_ext")
    shutil.copytree(ROOT / "kvshot", tmp_path / "kvshot")
    for name in ("_config.yml", "book/_toc.yml", "book/references.bib"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_toc.yml").write_text(yaml.safe_dump(TOC))
    (tmp_path / "book/intro.md").write_text("# Home\n\nAbout {cite:t}`liu2026drift`.\n")
    (tmp_path / "book/prose.md").write_text(
        "# Prose\n\nThe value is {glue:text}`notebooks/one.ipynb::value:.1f` here.\n\n$$\nx\n$$\n")
    (tmp_path / "book/bibliography.md").write_text("# Bibliography\n\n```{bibliography}\n```\n")
    write_plan(tmp_path, {"notebook": "one.ipynb"})
    return tmp_path


def glue_notebook(root: Path, value: float) -> None:
    write_notebook(root / "notebooks/one.ipynb",
                   [f"value = {value}", "from kvshot.notebook import glue\nglue('value', value)"], "# One")
    path = root / "notebooks/one.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, notebook.cells.pop())
    path.write_text(nbformat.writes(notebook), encoding="utf8")


def build(root: Path) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).with_name("jupyter-book")), "build", "book/"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


def text(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text())


@pytest.mark.slow
def test_the_typed_command_builds_pages_that_follow_their_notebook(book):
    glue_notebook(book, 1.25)
    result = build(book)
    assert result.returncode == 0, result.stdout + result.stderr
    prose = book / "_build/html/prose.html"
    assert "The value is 1.2 here" in text(prose)
    assert (book / "_build/html/_static/tex-svg.js").is_file()

    glue_notebook(book, 7.75)    # the page itself is untouched, its number must follow all the same
    assert build(book).returncode == 0
    assert "The value is 7.8 here" in text(prose)

    toc = copy.deepcopy(TOC)
    del toc["parts"][1]["numbered"]
    (book / "_toc.yml").write_text(yaml.safe_dump(toc))
    result = build(book)
    assert result.returncode == 0, result.stderr

    (book / "book/prose.md").write_text("# Prose\n\n{glue:text}`notebooks/one.ipynb::valeu:.1f`\n")
    result = build(book)
    assert result.returncode == 1 and "valeu" in result.stderr

    write_notebook(book / "notebooks/one.ipynb", ["value = 1", "1 / 0"], "# One")
    result = build(book)
    assert result.returncode == 1
    assert "notebooks/one.ipynb" in result.stderr and "ZeroDivisionError" in result.stderr
