"""Experts spread over real processes: right outputs over gloo, and as many bytes as the plan says."""

import os
import subprocess
import sys
from pathlib import Path

from warmroot.actors.parallel.rendezvous import serve_store

RANK = Path(__file__).with_name("moe_rank.py")
HARNESS = Path(__file__).parents[1] / "unit"
LIMIT_S = 60.0
SIZE, TP = 4, 2


def test_tokens_travel_between_processes():
    store = serve_store("127.0.0.1", LIMIT_S)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HARNESS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(SIZE), str(TP), str(store.port)],
            env=environment,
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(SIZE)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
            process.wait()
