"""What is left of a cluster whose starter is gone is ended, and nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

from warmroot.deploy import sweeper

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STARTER = """
import os, sys, subprocess
from pathlib import Path
from warmroot.deploy import sweeper
folder = Path(sys.argv[1])
sweeper.watch(folder)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True,
                         stdout=subprocess.DEVNULL, env={**os.environ, sweeper.MARK: str(folder)})
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def member(folder: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(SLEEP, env={**os.environ, sweeper.MARK: str(folder)})
    wait_for(lambda: f"{sweeper.MARK}={folder}".encode() in Path(f"/proc/{child.pid}/environ").read_bytes())
    return child


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_members_are_killed_and_others_are_not(tmp_path: Path):
    mine, theirs = tmp_path / "wr-1-mine", tmp_path / "wr-1-mine-too"
    mine.mkdir(), theirs.mkdir()
    member_of_mine, member_of_theirs = member(mine), member(theirs)
    try:
        sweeper.sweep(mine)
        assert member_of_mine.wait(5) == -9
        assert member_of_theirs.poll() is None
        assert (mine.exists(), theirs.exists()) == (False, True)
    finally:
        member_of_theirs.kill()
        member_of_theirs.wait()


def test_children_that_have_lost_the_mark_go_too(tmp_path: Path):
    program = (
        f"import os, subprocess, sys, time; del os.environ['{sweeper.MARK}'];"
        f"print(subprocess.Popen({SLEEP!r}).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, sweeper.MARK: str(tmp_path)}, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        sweeper.sweep(tmp_path)
    wait_for(lambda: not is_running(child))


def test_a_starter_that_is_killed_leaves_nothing(tmp_path: Path):
    folder = tmp_path / "wr-2-x"
    folder.mkdir()
    run = subprocess.run([sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE, check=False)
    assert run.returncode == -9
    wait_for(lambda: not folder.exists() and not is_running(int(run.stdout)))


def test_stale_folders_are_swept_at_the_next_start(tmp_path: Path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale, alive, odd = (tmp_path / f"wr-{pid}-x" for pid in (gone.pid, os.getpid(), "no"))
    for folder in (stale, alive, odd):
        folder.mkdir()
    sweeper.sweep_stale(tmp_path)
    assert [folder.exists() for folder in (stale, alive, odd)] == [False, True, True]
