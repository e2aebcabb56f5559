"""Tables for people, one JSON object at the end for programs; processes by role; the command line of the benches."""

import json
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from warmroot.cluster.errors import ConfigError
from warmroot.deploy.bench import engine
from warmroot.deploy.bench.lineup import lineup
from warmroot.deploy.bench.processes import cpu_seconds_by_role, role_of
from warmroot.deploy.bench.report import Report


def test_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("demo", {"seed": 3}, json_only=False)
    report.note("working")
    report.bar("fast enough", 1.5, 1.0)
    report.result["figures"] = {"a": math.nan, "b": (1.23456789, 2)}
    assert report.finish() == 0
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert result["bench"] == "demo" and result["parameters"] == {"seed": 3}
    assert result["figures"] == {"a": None, "b": [1.23457, 2]}
    assert result["bars"]["fast enough"]["holds"] is True
    assert result["machine"]["cores"] == os.cpu_count()
    assert "working" in "\n".join(out[:-1])


def test_json_only_keeps_stdout_clean_and_a_missed_bar_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with Report("demo", {}, json_only=True) as report:
        print("a library talks")
        report.table("T", ("", "x"), [("row", "1")])
        report.bar("added ms", 12.0, 10.0, at_least=False)
        assert report.finish() == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert "added ms" in captured.err and "a library talks" in captured.err and "NO" in captured.err


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:warmroot:Ingress", "ingress"),
        ("ray::ServeReplica:warmroot:Replica.generate", "replica"),
        ("/x/y/haproxy -f haproxy.cfg -db", "haproxy"),
        ("ray::ServeController.listen_for_change", "serve"),
        ("ray::ProxyActor", "serve"),
        ("/x/raylet/raylet --node-ip 127.0.0.1", "ray"),
    ],
)
def test_roles(command: str, role: str) -> None:
    assert role_of(command) == role


def test_cpu_of_descendants() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < .3: pass\ninput()"], stdin=-1
    )
    try:
        deadline, others = time.monotonic() + 30, 0.0
        while (used := cpu_seconds_by_role(os.getpid()).get("ray", 0.0)) - others < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            # Other tests may have left processes behind that wait for more to do.
            others = cpu_seconds_by_role(os.getpid(), leave_out=child.pid).get("ray", 0.0)
        assert used - others >= 0.1
    finally:
        child.communicate(b"\n")


OPTIONS = {
    "threads": 2, "streams": (1, 8), "max_model_len": 256, "max_num_seqs": 32, "seed": 0, "dtype": ("fp16", "fp32"),
    "peers": "none",
    "llama_python": None, "llama_dtype": ("fp16", "q8_0"),
    "vllm_python": None, "vllm_dtype": ("fp32", "bf16"), "vllm_eager": True,
}  # fmt: skip


def test_lineup_of_our_precisions_and_peers() -> None:
    options = Namespace(**{**OPTIONS, "peers": "llama.cpp", "llama_python": sys.executable})
    entries = lineup(options, Path("model.gguf"), Path("scratch"))
    assert [entry.name for entry in entries] == ["warmroot fp16", "warmroot fp32", "llama.cpp fp16", "llama.cpp q8_0"]
    assert [entry.is_ours for entry in entries] == [True, True, False, False]
    assert entries[2].settings["max_num_seqs"] == 32
    options.peers, options.vllm_python = "vllm", sys.executable
    assert lineup(options, Path(__file__).parent, Path("scratch"))[-1].name == "vllm bf16 eager"


@pytest.mark.parametrize(("peers", "message"), [("vllm", "vllm is not installed"), ("gpt", "'gpt' is not one of")])
def test_lineup_refuses_what_is_not_there(peers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lineup(Namespace(**{**OPTIONS, "peers": peers}), Path("model.gguf"), Path("scratch"))


@pytest.mark.parametrize(
    "flags", [["--dtype", "fp12"], ["--skip", "zero"], ["--streams", "1,x"], ["--llama-dtype", "q9"]]
)
def test_bad_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        engine.main(flags)
