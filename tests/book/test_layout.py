"""The files around the book agree with each other and with what is installed."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from kvshot_book.plan import load_plan
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf8")


def toc_pages() -> list[str]:
    """All files of the table of contents, whatever the nesting."""
    def walk(node):
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("root", "file"):
                    yield value
                else:
                    yield from walk(value)
        elif isinstance(node, list):
            for value in node:
                yield from walk(value)

    return list(walk(yaml.safe_load(read("_toc.yml"))))


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def constraints() -> dict[str, Requirement]:
    (path,) = ROOT.glob("constraints-*.txt")
    lines = [line for line in path.read_text(encoding="utf8").splitlines() if not line.startswith("#")]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def test_toc_and_plan_name_the_same_notebooks_in_the_same_order():
    pages = toc_pages()
    planned = [f"notebooks/{page.name}" for page in load_plan(ROOT)]
    assert [page for page in pages if page.startswith("notebooks/")] == planned
    for page in pages:
        if not page.startswith("notebooks/"):
            assert (ROOT / "book" / f"{page}.md").is_file(), page


def test_every_notebook_is_in_the_plan():
    assert {p.name for p in (ROOT / "notebooks").glob("*.ipynb")} == {p.source.name for p in load_plan(ROOT)}


def test_stub_toc_has_the_same_root():
    stub, toc = (yaml.safe_load(read(name)) for name in ("book/_toc.yml", "_toc.yml"))
    assert stub == {"format": toc["format"], "root": toc["root"]}


def test_environment_yml_lists_what_pyproject_lists():
    dependencies = yaml.safe_load(read("environment.yml"))["dependencies"]
    (pip,) = [d["pip"] for d in dependencies if isinstance(d, dict)]
    assert pip[0] == "-e ."
    assert {canonicalize_name(Requirement(r).name): Requirement(r) for r in pip[1:]} == requirements()
    assert len(pip) - 1 == len(requirements())
    python = tomllib.loads(read("pyproject.toml"))["project"]["requires-python"]
    assert f"python{python}" in dependencies


def test_every_range_has_a_lower_and_an_upper_bound():
    for requirement in requirements().values():
        assert {s.operator for s in requirement.specifier} == {">=", "<"}, requirement


def test_constraints_pin_every_dependency_within_its_range():
    pins = constraints()
    torch = Requirement(re.search(r"^TORCH \?= (\S+)$", read("Makefile"), re.M)[1])
    assert "torch" not in pins
    for name, requirement in requirements().items():
        assert name == "torch" or name in pins, requirement
        (pin,) = (torch if name == "torch" else pins[name]).specifier
        assert pin.operator == "==" and requirement.specifier.contains(pin.version), (requirement, pin)


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
def test_another_torch_sets_the_environment_up_again(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text(read(name))
    (tmp_path / "constraints-1.txt").touch()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "ok").touch()
    env = {name: value for name, value in os.environ.items() if name not in ("TORCH", "MAKEFLAGS")}

    def said(*arguments: str) -> str:
        return subprocess.run(["make", "-n", "test", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True,
                              check=True).stdout

    assert "pip install" not in said() and "torch==2.12.0\n" in said("TORCH=torch==2.12.0")
    (tmp_path / ".venv" / "torch").write_text("torch==2.12.0\n")
    assert "pip install" not in said() + said("TORCH=torch==2.12.0") and "pip install" in said("TORCH=torch==2.11.0")


def test_constraints_name_no_machine():
    (path,) = ROOT.glob("constraints-*.txt")
    assert not re.search(r"://|@|/|\+", "".join(str(r) for r in constraints().values())), path.name


def test_installed_packages_are_within_the_ranges():
    for name, requirement in requirements().items():
        assert requirement.specifier.contains(importlib.metadata.version(name)), name


def test_jupyter_book_is_version_1():
    """Version 2 ignores _config.yml and _toc.yml, builds nothing and exits 0."""
    assert importlib.metadata.version("jupyter-book").split(".")[0] == "1"


@pytest.mark.parametrize("page", ["README.md", "book/intro.md"])
def test_both_commands_are_shown(page):
    assert re.search(r"^make book\b.*\nmake test\b", read(page), re.M)
    assert re.search(r"^book:", read("Makefile"), re.M) and re.search(r"^test:", read("Makefile"), re.M)


def test_versions_agree():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == project["version"] == importlib.metadata.version("kvshot")
    assert citation["license"] == project["license"]
    assert "2604.26412" in citation["references"][0]["url"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_relative_links_resolve(page):
    links = [link for link in re.findall(r"\]\(([^)#]+)", read(page)) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.fixture
def html() -> Path:
    folder = ROOT / "_build" / "html"
    if not folder.is_dir():
        pytest.skip("no book has been built here: make book")
    return folder


def test_built_book_has_every_page(html):
    assert [page for page in toc_pages() if not (html / f"{page}.html").is_file()] == []


def test_built_pages_fetch_nothing_from_elsewhere(html):
    fetched = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*")
    for page in html.rglob("*.html"):
        assert fetched.findall(page.read_text(encoding="utf8")) == [], page
