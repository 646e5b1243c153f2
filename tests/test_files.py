"""Files appear whole or not at all, whatever goes wrong while they are written."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvshot.allocator import SETTINGS
from kvshot.errors import KvshotError
from kvshot.fileio import (
    atomic_file,
    atomic_folder,
    cache_dir,
    exclusive,
    require_space,
    restore_folder,
    sha256_file,
)
from kvshot.progress import progress


def test_a_file_is_replaced_only_when_the_block_ends_well(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with atomic_file(path) as tmp:
        tmp.write_text("one")
        assert not path.exists()
    with pytest.raises(RuntimeError), atomic_file(path) as tmp:
        tmp.write_text("two")
        raise RuntimeError("stop")
    assert path.read_text() == "one" and [p.name for p in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_full_disk_is_said_so(tmp_path, error):
    for make, path in ((atomic_file, tmp_path / "f"), (atomic_folder, tmp_path / "d")):
        with pytest.raises(KvshotError, match="no space left"), make(path):
            raise error
    assert not list(tmp_path.iterdir())


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "d"
    for text in ("one", "two"):
        with atomic_folder(path) as tmp:
            (tmp / f"{text}.txt").write_text(text)
    assert [p.name for p in path.iterdir()] == ["two.txt"] and [p.name for p in tmp_path.iterdir()] == ["d"]


def test_two_processes_of_one_number_do_not_share_a_temporary_name(tmp_path):
    """Containers on one cache folder: each may be process 1."""
    for make in (atomic_file, atomic_folder):
        with make(tmp_path / "x") as one, make(tmp_path / "x") as two:
            assert one != two and one.parent == two.parent == tmp_path
            for part in (one, two):
                (part / "file" if part.is_dir() else part).write_text("whole")
        assert [p.name for p in tmp_path.iterdir()] == ["x"]
        if make is atomic_file:
            (tmp_path / "x").unlink()


@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_that_stepped_aside_comes_back(tmp_path, monkeypatch, killed):
    path, real = tmp_path / "d.best", os.replace
    with atomic_folder(path) as tmp:
        (tmp / "one.txt").write_text("one")

    def replace(source, dest):
        if str(source).endswith(".tmp") or killed and str(source).endswith(".old"):
            raise PermissionError("not now")
        real(source, dest)

    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(PermissionError), atomic_folder(path) as tmp:
        (tmp / "two.txt").write_text("two")
    monkeypatch.setattr("os.replace", real)
    assert path.exists() != killed
    for name in (".d.best.old.7.ab.old", ".d.7.ab.old"):  # of other folders
        (tmp_path / name).mkdir()
    restore_folder(path)
    restore_folder(path)
    assert (path / "one.txt").read_text() == "one" and not (path / "two.txt").exists()
    assert len(list(tmp_path.iterdir())) == 3
    restore_folder(tmp_path / "never there")


def test_what_a_killed_process_moved_aside_does_not_outlive_its_successor(tmp_path):
    path, aside = tmp_path / "d", tmp_path / ".d.7.ab.old"
    aside.mkdir()
    for text in ("one", "two"):
        with atomic_folder(path) as tmp:
            (tmp / "a.txt").write_text(text)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_space_cache_and_hash(tmp_path, monkeypatch):
    require_space(tmp_path / "not" / "yet", 1, "a byte")
    with pytest.raises(KvshotError, match="needs .* GB but"):
        require_space(tmp_path, 10**18, "everything")
    monkeypatch.setenv("KVSHOT_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_progress_writes_lines_into_a_log(monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setattr("kvshot.progress.EVERY", 0.0)
    with progress("work", 4, start=1) as advance:
        advance(2, "nearly")
    assert "work: 3/4 after 0 s, 0 s left nearly" in capsys.readouterr().err
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with progress("work", 4) as advance:
        advance(2)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_the_command_line_restarts_with_the_allocator_settings():
    env = {k: v for k, v in os.environ.items() if k not in SETTINGS} | {"MALLOC_TOP_PAD_": "1000"}
    code = "import os; from kvshot.allocator import *; restart_with_settings(); print(*map(os.environ.get, SETTINGS))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [SETTINGS["MALLOC_MMAP_MAX_"], SETTINGS["MALLOC_TRIM_THRESHOLD_"], "1000"]


def test_a_folder_is_one_processes_own(tmp_path):
    pytest.importorskip("fcntl")
    hold = ("import sys\nfrom kvshot.fileio import exclusive\n"
            "with exclusive(sys.argv[1]):\n    print('in', flush=True)\n    sys.stdin.read()")
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "run")], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(KvshotError, match="another process is at work"), exclusive(tmp_path / "run"):
            pass
    finally:
        other.kill()
        other.communicate()
    with exclusive(tmp_path / "run"):  # the lock went with the process
        pass
