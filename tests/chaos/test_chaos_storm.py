"""The short storm: what ``make chaos`` does for half an hour, in a minute, without losing hosts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .site import why_no_site

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_no_site() is not None, reason=str(why_no_site())),
]

FAULTS = "rank killed,rank stopped,replica killed,ingress killed,controller,Redis killed,Redis's link,memory full,disk"
FLAGS = ["--minutes", "1", "--seed", "11", "--every", "7.5", "--clients", "4", "--pool", "32", "--faults", FAULTS]


def test_a_storm_loses_no_stream_changes_no_token_and_leaves_nothing_behind(tmp_path: Path):
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.chaos", *FLAGS, "--json", str(path)]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800, check=False)
    assert path.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(path.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert found["problems"] == [], done.stdout[-6000:]
    assert done.returncode == 0
    assert found["requests"]["lost"] == 0
    assert found["requests"]["answered"] >= 20
    assert sum(fault["strikes"] for fault in found["faults"].values()) >= 6
