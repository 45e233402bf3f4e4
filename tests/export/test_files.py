"""Files appear whole or not at all, and two runs do not share a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle_export.files import alone_in, whole_file
from eagle_run.errors import EagleError


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with whole_file(path) as temporary:
        temporary.write_text("all")
        assert not path.exists()
    assert path.read_text() == "all"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(error: BaseException) -> None:
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise error

    for error in (KeyboardInterrupt(), ValueError("x")):
        with pytest.raises(type(error)):
            write(error)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from eagle_export.files import whole_file
from eagle_run.errors import EagleError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writers = {
    "text": lambda path: path.write_text("x" * 9999),
    "safetensors": lambda path: save_file({"x": torch.zeros(9999)}, path),
    "torch": lambda path: torch.save(torch.zeros(9999), path),
}
for name, write in writers.items():
    try:
        with whole_file(Path(sys.argv[1]) / name) as temporary:
            write(temporary)
    except EagleError as error:
        print(name, error.message)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of Unix")
def test_a_full_disk_is_said_the_same_way_by_all_that_write(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["text", "safetensors", "torch"], run
    assert all("cannot be written" in line for line in lines)
    assert not list(tmp_path.iterdir())


def test_one_run_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with alone_in(tmp_path / "out"):
        with pytest.raises(EagleError, match="another run is writing"), alone_in(tmp_path / "out"):
            pass
        save_file({"x": torch.zeros(1)}, tmp_path / "out" / "x")
    with alone_in(tmp_path / "out"):  # free again, and what was written stays
        assert (tmp_path / "out" / "x").exists()


def test_a_folder_that_stays_empty_goes_away(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), alone_in(tmp_path / "out"):
        raise ValueError("no")
    assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    with alone_in(tmp_path / "there"):
        pass
    assert (tmp_path / "there").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EagleError, match="is a file"), alone_in(tmp_path / "file"):
        pass
