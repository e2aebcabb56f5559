"""Heats, the bars of the engine bench, and a whole run over contenders without processes."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import bench_fakes
import pytest

from warmroot.cluster.errors import ConfigError
from warmroot.deploy.bench.bars import shared_prefix_bars, stream_bars, ttft_bars
from warmroot.deploy.bench.lineup import Entry, heats, lineup
from warmroot.deploy.bench.precision import bits
from warmroot.deploy.bench.race import SCENARIOS, Race
from warmroot.deploy.bench.report import Report
from warmroot.deploy.bench.scenarios import QUICK
from warmroot.deploy.bench.workload import Workloads

OPTIONS: dict[str, Any] = {
    "threads": 2, "streams": (1, 8), "repeats": 2, "max_model_len": 256, "max_num_seqs": 8, "seed": 0,
    "scenarios": SCENARIOS, "peers": "none", "dtype": ("fp16",),
    "llama_python": None, "llama_dtype": ("fp16",), "vllm_python": None, "vllm_dtype": ("fp32",), "vllm_eager": False,
}  # fmt: skip


def entry(name: str) -> Entry:
    engine, precision = name.split()
    settings = {"precision": precision, "model": "model.gguf"}
    return Entry(engine=engine, precision=precision, module="none", settings=settings)


def entries(*names: str) -> list[Entry]:
    return [entry(name) for name in names]


def names(heat: Any) -> list[str]:
    return [member.name for member in heat.entries]


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_classes_of_precisions() -> None:
    assert [bits(name) for name in ("fp32", "bf16", "int8", "q8_0", "q4_1", "file")] == [32, 16, 8, 8, 4, 4]


def test_heats_by_class_with_the_8_bit_heat_last() -> None:
    found = heats(
        entries(
            "warmroot fp16", "warmroot fp32", "warmroot int8", "warmroot q4_1", "transformers fp32",
            "llama.cpp fp16", "llama.cpp q8_0", "llama.cpp q4_1", "vllm fp32", "vllm bf16",
        )
    )  # fmt: skip
    assert {heat.name: names(heat) for heat in found} == {
        "32-bit": ["warmroot fp32", "transformers fp32", "vllm fp32"],
        "16-bit": ["warmroot fp16", "llama.cpp fp16", "vllm fp32", "vllm bf16"],
        "4-bit": ["warmroot q4_1", "llama.cpp q4_1"],
        "8-bit": ["warmroot int8", "llama.cpp q8_0"],
    }
    assert found[-1].name == "8-bit"


def test_peers_of_a_class_without_us_run_in_the_nearest() -> None:
    (half,) = heats(entries("warmroot fp16", "transformers fp32", "llama.cpp q4_0"))
    assert names(half) == ["warmroot fp16", "transformers fp32", "llama.cpp q4_0"]
    eight, four = sorted(
        heats(entries("warmroot q4_0", "warmroot int8", "llama.cpp fp16")), key=lambda heat: -heat.bits
    )
    assert names(eight) == ["warmroot int8", "llama.cpp fp16"] and names(four) == ["warmroot q4_0"]


def ratios(ours: str, peers: dict[str, float], figure: str = "output") -> dict[str, dict[str, dict[str, float]]]:
    return {ours: {peer: {figure: value} for peer, value in peers.items()}}


@pytest.mark.parametrize(
    ("ours", "peers", "single", "batched"),
    [
        (
            "warmroot fp16",
            {"vllm bf16": 1.2, "llama.cpp fp16": 1.1, "transformers fp32": 3.0, "llama.cpp q4_0": 0.1},
            {"transformers": (3.0, 1.0), "vllm": (1.2, 1.3), "llama.cpp 16-bit": (1.1, 1.0)},
            {"transformers": (3.0, 1.0), "vllm": (1.2, 1.3), "llama.cpp 16-bit": (1.1, 1.3)},
        ),
        (
            "warmroot int8",
            {"llama.cpp q8_0": 1.2, "vllm bf16": 1.5},
            {"llama.cpp 8-bit": (1.2, 1.1)},
            {"best peer": (1.2, 1.6)},
        ),
        (
            "warmroot q4_1",
            {"llama.cpp q4_1": 1.4, "llama.cpp q4_0": 0.5},
            {"llama.cpp q4_1": (1.4, 1.0)},
            {"llama.cpp q4_1": (1.4, 1.3)},
        ),
        ("warmroot fp32", {"vllm fp32": 0.5}, {}, {}),
    ],
)  # fmt: skip
def test_stream_bars(ours: str, peers: dict[str, float], single: dict[str, Any], batched: dict[str, Any]) -> None:
    members = entries(ours, *peers)
    for concurrency, wanted, words in ((1, single, "single stream"), (8, batched, "8 streams")):
        found = list(stream_bars(members, concurrency, ratios(ours, peers)))
        assert {bar.name: (bar.value, bar.wanted) for bar in found} == {
            f"{ours} / {rival}, {words}": value for rival, value in wanted.items()
        }
        assert all(bar.at_least for bar in found)


def test_only_the_first_of_ours_in_a_class_is_held_to_its_bar() -> None:
    members = entries("warmroot bf16", "warmroot fp16", "vllm bf16")
    (bar,) = stream_bars(members, 8, ratios("warmroot bf16", {"vllm bf16": 1.5}))
    assert bar.name == "warmroot bf16 / vllm, 8 streams"


def test_ttft_is_held_against_comparable_peers() -> None:
    members = entries("warmroot int8", "llama.cpp q8_0", "vllm bf16")
    (bar,) = ttft_bars(members, ratios("warmroot int8", {"llama.cpp q8_0": 0.8, "vllm bf16": 1.7}, "ttft"))
    assert (bar.value, bar.wanted, bar.at_least) == (0.8, 1.0, False)
    four = entries("warmroot q4_1", "llama.cpp q4_0")
    assert not list(ttft_bars(four, ratios("warmroot q4_1", {"llama.cpp q4_0": 2.0}, "ttft")))


def test_shared_prefix_bar_is_for_16_bits() -> None:
    (bar,) = shared_prefix_bars(entry("warmroot fp16"), {"vllm fp32": 1.6, "vllm bf16": 1.25})
    assert bar.value == 1.25 and bar.wanted == 1.3
    assert not list(shared_prefix_bars(entry("warmroot int8"), {"vllm bf16": 1.0}))


SECONDS = {
    "warmroot fp16": 0.010, "warmroot fp32": 0.020, "warmroot int8": 0.005, "warmroot q4_1": 0.004,
    "transformers fp32": 0.050, "llama.cpp q8_0": 0.020, "llama.cpp q4_1": 0.030, "vllm bf16": 0.011,
}  # fmt: skip


def race(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], members: list[Entry]) -> dict[str, Any]:
    started = bench_fakes.install(monkeypatch, SECONDS)
    with Report("engine", {}, json_only=True) as report:
        Race(Namespace(**OPTIONS), QUICK, report, Workloads(encode, 0), encode).run(members)
        report.finish()
    assert all(contender.closed for contender in started)
    return json.loads(capsys.readouterr().out)


def test_a_run_measures_every_heat_and_holds_the_bars(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = race(monkeypatch, capsys, entries(*(name for name in SECONDS if name != "warmroot fp32")))
    assert list(result["heats"]) == ["16-bit", "4-bit", "8-bit"]
    # The fastest peer so far is a guest of the last heat.
    assert "vllm bf16" in result["heats"]["8-bit"]["contenders"]
    assert result["quality_text"]["reference"] == "transformers fp32"
    bars = {name: (round(bar["value"], 3), bar["holds"]) for name, bar in result["bars"].items()}
    assert bars["warmroot fp16 / vllm, 8 streams"] == (1.1, False)
    assert bars["warmroot fp16: TTFT / best peer's"] == (round(10 / 11, 3), True)
    assert bars["warmroot int8 / llama.cpp 8-bit, single stream"] == (4.0, True)
    assert bars["warmroot int8 / best peer, 8 streams"] == (2.2, True)
    assert bars["warmroot q4_1 / llama.cpp q4_1, 8 streams"] == (7.5, True)
    assert bars["warmroot fp16 / vllm, shared prefix"] == (1.1, False)
    assert bars["warmroot fp16: shared prefix, cache on / off"] == (10.0, True)
    assert bars["warmroot fp16: argmax agreement"] == (1.0, True)
    assert bars["warmroot int8: perplexity / 16-bit"] == (1.005, True)
    assert bars["warmroot int8: step outside the kernels"] == (0.05, True)
    assert bars["warmroot fp16: cost of the cache without hits"] == (0.0, True)
    assert "warmroot q4_1: argmax agreement" not in bars
    assert result["heats"]["4-bit"]["quality"]["warmroot q4_1"]["argmax_agreement"] == 0.0


def test_our_own_fp32_weights_are_the_reference_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = race(monkeypatch, capsys, entries("warmroot int8"))
    assert result["quality_text"]["reference"] == "warmroot fp32"
    assert result["bars"]["warmroot int8: perplexity / 16-bit"]["value"] == pytest.approx(1.00501, abs=1e-5)


def test_packed_formats_need_a_gguf_file() -> None:
    with pytest.raises(ConfigError, match="q4_0 needs a model in a GGUF file"):
        lineup(Namespace(**{**OPTIONS, "dtype": ("q4_0",)}), Path("folder"), Path("scratch"))


def test_packed_formats_load_a_file_of_that_type() -> None:
    options = Namespace(**{**OPTIONS, "dtype": ("int8", "q4_0"), "llama_python": sys.executable})
    plain, packed = lineup(options, Path("model.gguf"), Path("scratch"))
    assert plain.gguf is None and plain.settings["precision"] == "int8"
    assert packed.gguf is not None and packed.gguf.precision == "q4_0" and packed.name == "warmroot q4_0"
