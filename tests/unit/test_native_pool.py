"""The kernels' thread pool: its stress program, and its size."""

import shutil
import subprocess
from pathlib import Path

import pytest

from warmroot.actors.kernels.library import native, runnable

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_stress(tmp_path):
    program = tmp_path / "pool_stress"
    sources = [ROOT / "tests/native/pool_stress.cpp", ROOT / "actors/kernels/native/pool.cpp"]
    subprocess.run([COMPILER, "-std=c++20", "-O2", "-pthread", *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([str(program), "3000"], check=False, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("passed", "", 0)


@pytest.mark.skipif(native() is None, reason="no native kernels")
def test_number_of_threads():
    for library in runnable():
        before = library.num_threads
        assert before >= 1
        for wanted, given in ((3, 3), (1, 1), (0, 1), (2, 2)):
            library.set_num_threads(wanted)
            assert library.num_threads == given
        library.set_num_threads(before)
