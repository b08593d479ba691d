"""Files and folders appear whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from posttune.errors import UserError
from posttune.files import atomic_dir, atomic_write_bytes, atomic_write_text, put_back


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_file_is_written_with_its_folder(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "a/b/c.txt", "é")
    assert (tmp_path / "a/b/c.txt").read_bytes() == "é".encode()
    assert names(tmp_path / "a/b") == {"c.txt"}


def test_a_file_replaces_the_one_before(tmp_path: Path) -> None:
    atomic_write_bytes(tmp_path / "a", b"old")
    atomic_write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_files_get_the_usual_permissions(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        atomic_write_text(tmp_path / "file", "")
        with atomic_dir(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o755


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="irectory"):
        atomic_write_text(tmp_path / "a", "x")
    assert names(tmp_path) == {"a"}


def test_a_folder_appears_when_its_block_ends(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "out") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out/x").read_text() == "1"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_block_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with atomic_dir(tmp_path / "out") as folder:
            (folder / "x").write_text("1")
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == set()


def test_a_used_place_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("1")
    with pytest.raises(UserError, match="exists already"), atomic_dir(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert names(tmp_path / "out") == {"precious"}


def test_an_empty_folder_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with atomic_dir(tmp_path / "out") as folder:
        (folder / "x").touch()
    assert names(tmp_path / "out") == {"x"}


def test_a_replaced_folder_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/old").touch()
    with pytest.raises(ValueError), atomic_dir(tmp_path / "out", replace=True):
        raise ValueError
    assert names(tmp_path / "out") == {"old"}
    with atomic_dir(tmp_path / "out", replace=True) as folder:
        (folder / "new").touch()
        assert names(tmp_path / "out") == {"old"}
    assert names(tmp_path / "out") == {"new"}
    assert names(tmp_path) == {"out"}


KILLED = """
import os, signal, sys
from posttune.files import atomic_dir
with atomic_dir(sys.argv[1]) as folder:
    (folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(names(tmp_path)) == 1
    with atomic_dir(tmp_path / "out"):
        pass
    assert names(tmp_path) == {"out"}


BETWEEN_THE_RENAMES = """
import os, signal, sys
from pathlib import Path
from posttune.files import atomic_dir
rename, calls = Path.replace, []
def replace(self, target):
    calls.append(target)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.replace = replace
with atomic_dir(sys.argv[1], replace=True) as folder:
    (folder / "new").write_text("x")
"""


def killed_between_the_renames(path: Path) -> None:
    path.mkdir()
    (path / "old").touch()
    done = subprocess.run([sys.executable, "-c", BETWEEN_THE_RENAMES, str(path), "2"])
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()


def test_what_was_giving_way_when_its_process_died_comes_back(tmp_path: Path) -> None:
    killed_between_the_renames(tmp_path / "out")
    put_back(tmp_path / "out")
    assert names(tmp_path / "out") == {"old"}
    with atomic_dir(tmp_path / "out", replace=True) as folder:
        (folder / "newer").touch()
    assert names(tmp_path / "out") == {"newer"}
    assert names(tmp_path) == {"out"}


def test_nothing_is_written_over_what_comes_back(tmp_path: Path) -> None:
    killed_between_the_renames(tmp_path / "out")
    with pytest.raises(UserError, match="exists already"), atomic_dir(tmp_path / "out"):
        pass
    assert names(tmp_path / "out") == {"old"}


def test_the_slower_of_two_writers_is_refused(tmp_path: Path) -> None:
    def write_slowly() -> None:
        with atomic_dir(tmp_path / "out") as slow:
            (slow / "a").touch()
            with atomic_dir(tmp_path / "out") as fast:
                (fast / "b").touch()

    with pytest.raises(UserError, match="exists already"):
        write_slowly()
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"b"}
