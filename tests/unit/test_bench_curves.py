"""``warmroot bench curves`` over contenders without processes."""

import json
from pathlib import Path

import bench_fakes
import pytest

from warmroot.cluster.errors import ConfigError
from warmroot.deploy.bench import curves


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    return str(tmp_path / "model")


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[dict[str, object], list[bench_fakes.FakeContender]]:
    started = bench_fakes.install(monkeypatch, {"warmroot fp16": 0.01, "warmroot int8": 0.005})
    assert curves.main([*flags, "--json", "--dtype", "fp16,int8", "--threads", "1,2"]) == 0
    return json.loads(capsys.readouterr().out), started


def test_points_of_every_precision_and_thread_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.png"
    result, started = run(monkeypatch, capsys, model, "--plot", str(plot))
    assert [(c["precision"], c["threads"]) for c in result["curves"]] == [
        ("fp16", 1), ("int8", 1), ("fp16", 2), ("int8", 2),
    ]  # fmt: skip
    assert [contender.settings["threads"] for contender in started] == [1, 1, 2, 2]
    assert all(contender.closed for contender in started)
    first = result["curves"][0]
    assert [point["batch"] for point in first["batch"]] == [1, 2, 4, 8, 16, 32, 64]
    # The median of 20, 10 and 30 ms.
    assert first["batch"][3] == {"batch": 8, "context": 320, "step_s": 0.02, "tokens_per_s": 400.0, "steps": 3}
    # The fake's context ends at 2,048 tokens.
    assert [(point["batch"], point["context"]) for point in first["context"]] == [
        (batch, context) for batch in (1, 8) for context in (128, 512, 2048)
    ]
    assert first["prefill"][-1]["tokens_per_s"] == pytest.approx(2048 / 0.02)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_points_without_room_are_null(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_fakes.FakeContender, "call", lambda self, method, **arguments: None)
    result, _ = run(monkeypatch, capsys, model)
    assert result["curves"][0]["prefill"][0] == {"chunk": 16, "step_s": None, "tokens_per_s": None, "steps": 0}
    assert "plot" not in result


def test_a_plot_that_was_asked_for_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(curves, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'warmroot\[bench\]'"):
        curves.main([model, "--plot", "x.png"])
