"""``warmroot bench speculative --quick`` on a small model: who takes part, what is compared, what is held to bars."""

import json

import pytest
from training_models import write_small_llama

from warmroot.cluster.messages import Load
from warmroot.deploy.bench import speculative
from warmroot.deploy.bench.speculative_engines import Drafted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_small_llama(path, max_position_embeddings=2048)
    return str(path)


def run(capsys, *argv: str) -> dict:
    assert speculative.main([*argv, "--quick", "--json", "--dtype", "fp32", "--threads", "1"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_methods_take_turns(folder, capsys):
    result = run(capsys, folder, "--draft-model", folder)
    assert result["skipped"] == {"medusa": "no --medusa", "recurrent": "no --recurrent"}
    kinds = ["summarise", "edit", "extract", "free"]
    assert list(result["workloads"]) == [*kinds, "free, temperature 0.7", "4 streams"]
    for name, figures in result["workloads"].items():
        assert list(figures) == ["off", "ngram", "layer_skip", "draft_model"]
        assert figures["off"]["ratio"] == 1.0 and figures["off"]["drafts"] == 0
        for method in figures.values():
            assert method["tokens_per_s"] > 0 and method["ratio"] > 0
            assert method["equal_outputs"] == (None if "temperature" in name else 1.0)
            places = method["accepted_by_place"]
            assert places == sorted(places, reverse=True)
    assert all(result["workloads"][kind]["draft_model"]["acceptance_rate"] == 1.0 for kind in kinds), "by itself"
    bars = result["bars"]
    assert bars["equal greedy outputs"]["value"] == 1.0
    assert {name for name in bars if "4 streams" in name} == {
        f"{method} / off, 4 streams" for method in ("ngram", "layer_skip", "draft_model")
    }
    assert bars["ngram / off, summarise, edit and extract"]["wanted"] == 1.5
    assert bars["best trained method / off, free text"]["wanted"] == 1.3


def test_without_trained_weights_their_bar_is_absent(folder, capsys):
    result = run(capsys, folder, "--streams", "1")
    assert set(result["skipped"]) == {"draft_model", "medusa", "recurrent"}
    assert set(result["bars"]) == {"ngram / off, summarise, edit and extract", "equal greedy outputs"}


def test_drafts_are_counted_from_a_moment_on():
    before = Load(num_drafts=2, num_draft_tokens=6, accepted_by_place=(2, 1))
    after = Load(num_drafts=6, num_draft_tokens=18, accepted_by_place=(5, 2, 1))
    assert Drafted.between(before, after).to_json() == {
        "drafts": 4,
        "acceptance_rate": pytest.approx(5 / 12),
        "accepted_per_draft": pytest.approx(5 / 4),
        "accepted_by_place": [3 / 4, 1 / 4, 1 / 4],
    }
    assert Drafted.between(after, after).to_json()["acceptance_rate"] is None
