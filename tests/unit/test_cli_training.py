"""``warmroot train-medusa`` and ``train-draft`` from the first text to weights that an engine drafts with."""

import json

import pytest
import torch
from safetensors.torch import load_file
from training_models import write_small_llama

from warmroot.actors.models.draft_head import DRAFT_HEAD, load_draft_model
from warmroot.cluster.errors import ConfigError
from warmroot.deploy.cli import train_draft, train_medusa

SIZES = {"tokens": 1500, "minutes": 1, "epochs": 2, "vocabulary": 64, "streams": 16, "max-tokens": 40, "threads": 1}
QUICK = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_small_llama(folder)
    return folder


def check(folder, figures, capsys):
    assert json.loads(capsys.readouterr().out) == figures
    facts = json.loads((folder / "acceptance.json").read_text())
    assert facts["held_out"] == figures
    assert facts["vocabulary"] == 64 and 0.3 < facts["coverage"] <= 1.0 and facts["tokens"] > 1000
    assert facts["epochs"] == 2 and 0 < facts["training_s"] < 60
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("features*"))


def test_a_draft(model, tmp_path, capsys):
    argv = [str(model), "--output", str(tmp_path), "--layers", "2", *QUICK]
    assert train_draft.main(argv) == 0
    figures = json.loads((tmp_path / "acceptance.json").read_text())["held_out"]
    check(tmp_path, figures, capsys)
    accepted = figures["accepted"]
    assert accepted == sorted(accepted, reverse=True) and accepted[0] == figures["greedy"] > 0.0
    decoder = load_draft_model(tmp_path, dtype="float32", device=torch.device("cpu"))
    assert decoder.spec.num_layers == 2
    assert len(load_file(tmp_path / DRAFT_HEAD)["token_map"]) == 64
    assert (tmp_path / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()


def test_heads(model, tmp_path, capsys):
    argv = [str(model), "--output", str(tmp_path), "--heads", "3", "--batch-size", "128", *QUICK]
    assert train_medusa.main(argv) == 0
    figures = json.loads((tmp_path / "acceptance.json").read_text())["held_out"]
    check(tmp_path, figures, capsys)
    assert len(figures["accepted"]) == len(figures["by_rank"]) == 3
    assert figures["tokens_per_step"] == pytest.approx(1 + sum(figures["accepted"]))
    assert json.loads((tmp_path / "config.json").read_text())["num_heads"] == 3


def test_the_users_own_text(model, tmp_path, capsys):
    data = tmp_path / "book.txt"
    data.write_text("the world is the end of the world, said the world. " * 300)
    argv = [str(model), "--output", str(tmp_path / "heads"), "--data", str(data), *QUICK]
    assert train_medusa.main([*argv, "--epochs", "1"]) == 0
    text = json.loads((tmp_path / "heads" / "texts.jsonl").read_text().splitlines()[0])
    assert text["start"] == 0 and len(text["token_ids"]) == 296


def test_wrong_layers_are_refused_before_anything_is_written(model, tmp_path):
    with pytest.raises(ConfigError, match="--layers: must be between 1 and 2"):
        train_draft.main([str(model), "--output", str(tmp_path), "--layers", "3", *QUICK])
    assert not (tmp_path / "texts.jsonl").exists()
