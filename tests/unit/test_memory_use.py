"""What a rank says that it holds, by what the kernel lists."""

import mmap

import pytest

from warmroot.actors.parallel.memory_use import held_bytes, peak_bytes

STATUS = "Name:\tpython\nVmHWM:\t   700 kB\nRssAnon:\t     300 kB\nRssFile:\t  90 kB\n"
MAPS = """\
10000-20000 r--s 00000000 08:01 42                                  /cache/packed/model with spaces.bin
20000-40000 r--p 00000000 08:01 43                                  /usr/lib/libc.so
40000-80000 rw-s 00000000 00:01 44                                  /memfd:warmroot (deleted)
80000-90000 rw-p 00000000 00:00 0
"""


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "maps").write_text(MAPS)
    return tmp_path


def test_private_memory_and_whole_packed_files(proc):
    assert held_bytes(proc) == 300 * 1024 + 0x10000


@pytest.mark.parametrize(("expected", "peak"), [(500, 700 * 1024), (900 * 1024, 900 * 1024)])
def test_the_peak_is_what_was_or_what_will_be(proc, expected, peak):
    assert peak_bytes(expected, proc) == peak


def test_a_mapped_file_counts_before_it_is_read(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\0" * 2**23)
    with path.open("rb") as file:
        before = held_bytes()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            assert held_bytes() - before > 0.9 * 2**23


def test_where_there_is_no_proc(tmp_path):
    assert held_bytes(tmp_path) > 0
    assert peak_bytes(2**60, tmp_path) == 2**60
