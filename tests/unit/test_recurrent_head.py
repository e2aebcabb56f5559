"""A recurrent head, from training on a small model's own texts to engines that draft with it."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from medusa_harness import HIDDEN, VOCAB, make_engine, medusa, run, save_heads, save_model, texts_of, tokens
from safetensors.torch import save_file
from sampled_requests import PARAMS, requests_with

from warmroot.actors.models.loader import load_model
from warmroot.actors.models.recurrent_head import is_recurrent_head, load_recurrent_head
from warmroot.actors.training.corpus import Text
from warmroot.actors.training.features import Features
from warmroot.actors.training.model_parts import embedding_table, head_rows
from warmroot.actors.training.recurrent_head import RecurrentHead, RecurrentTask, write_recurrent_head
from warmroot.actors.training.trainer import Schedule, Trainer
from warmroot.actors.training.vocabulary import Vocabulary
from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.cluster.kv_formats import KV_FORMATS

CPU = torch.device("cpu")
REQUESTS = requests_with(PARAMS | {"only what it lacks": {"temperature": 0.8, "allowed_token_ids": (3, 4)}})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder)


@pytest.fixture(scope="module")
def decoder(model):
    return load_model(model[0], dtype="float32", device=CPU)


@pytest.fixture(scope="module")
def trained(model, decoder, tmp_path_factory):
    """(the folder of a head over all tokens but two, what it was trained with)."""
    texts = [Text(token_ids, 1) for token_ids in texts_of(model[1])]
    kept = torch.tensor([token for token in range(VOCAB) if token not in (3, 4)])
    words = Vocabulary(kept, torch.tensor([-1 if t in (3, 4) else t - 2 * (t > 4) for t in range(VOCAB)]))
    torch.manual_seed(0)
    head = RecurrentHead(head_rows(model[0], kept), embedding_table(model[0]), 64)
    task = RecurrentTask.of(head, texts, Features.of(decoder, texts, lambda _: None), words, 3)
    folder = tmp_path_factory.mktemp("head")
    schedule = Schedule(seconds=1e9, epochs=12, batch_size=64, learning_rate=1e-2)
    before = task.accuracy()["accepted"][0]
    assert all(Trainer(head, task, schedule, folder / "state.pt", count().__next__).run())
    assert task.accuracy()["accepted"][0] > 1.5 * before
    write_recurrent_head(folder, head, words)
    return folder, task


def test_places_are_along_the_text(trained):
    """Each place's state has read the tokens before it, and is held against what the model says behind them."""
    _, task = trained
    rows = torch.tensor([4, 60])
    places = task._places(rows)
    assert len(places) == 3
    first = task.features.rows(1)  # three tokens were not its own
    greedy = task.features.top_ids[first.start + 3 : first.stop - 1, 0].tolist()
    assert task.following[first.start + 3 : first.stop - 1].tolist() == greedy
    state = task.features.hidden[rows].float()
    for place, (found, targets) in enumerate(places):
        state = task.head(state, task.following[rows + place])
        torch.testing.assert_close(found, state)
        wanted = task.vocabulary.places[task.features.top_ids[rows + place + 1].long()]
        assert torch.equal(targets.places, wanted)
    ends = torch.nonzero(task.features.left == 1).flatten()[:2]
    assert [len(state) for state, _ in task._places(ends)] == [2, 0, 0]


def test_figures(trained):
    figures = trained[1].accuracy()
    assert figures["accepted"] == sorted(figures["accepted"], reverse=True)
    assert figures["accepted"][0] > 0.5 and figures["tokens_per_step"] == 1 + sum(figures["accepted"])


def test_what_is_loaded_is_what_was_trained(trained, decoder):
    folder, task = trained
    assert is_recurrent_head(folder) and not is_recurrent_head(folder / "nothing")
    head = load_recurrent_head(folder, decoder)
    state, came = torch.randn(4, HIDDEN), torch.tensor([5, 3, 9, 20])
    expected = task.head(state, came)
    logprobs = task.head.lm_head(expected).log_softmax(1)
    values, places = logprobs.topk(3)
    for computed in (head, replace(head, native=None)):
        advanced, token_ids, found = computed.guess(state, came, 3)
        torch.testing.assert_close(advanced, expected, rtol=1e-2, atol=2e-2)
        torch.testing.assert_close(found, values, rtol=2e-2, atol=5e-2)
        assert torch.equal(token_ids[:, 0], task.vocabulary.token_map[places[:, 0]])
    assert not set(range(3, 5)) & set(head.guess(state, came, VOCAB)[1].flatten().tolist())


def test_it_reads_the_embedding_that_the_model_has_now(trained, decoder, monkeypatch):
    head = load_recurrent_head(trained[0], decoder)
    state, came = torch.randn(4, HIDDEN), torch.tensor([5, 3, 9, 20])
    expected = head.guess(state, came.roll(1), 3)
    old = decoder.embedding
    monkeypatch.setattr(decoder, "embedding", lambda token_ids: old(token_ids.roll(1)))
    for found, wanted in zip(head.guess(state, came, 3), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("streams", [1, 16])
def test_greedy_output_is_the_same(decoder, model, trained, streams):
    params = {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True}
    requests = {f"g{index}": (text[:4], params) for index, text in enumerate(texts_of(model[1])[:streams])}
    plain = tokens(run(make_engine(decoder, None), requests))
    engine = make_engine(decoder, medusa(trained[0], 4))
    assert tokens(run(engine, requests)) == plain
    assert tokens(run(engine, requests)) == plain, "with cached prefixes"
    places = engine.speculator.counts.accepted_by_place
    assert len(places) >= 2 and places[0] > 20 * streams


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 60}, {"max_num_batched_tokens": 40}, {"kv_dtype": KV_FORMATS["int8"], "block_size": 16}],
    ids=["plain", "preempted", "chunks", "int8"],
)
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_whatever_is_asked_for_guesses_change_nothing(decoder, trained, options, verification):
    """Also where a request allows only what the head has never heard of."""
    plain = run(make_engine(decoder, None, **options), REQUESTS)
    engine = make_engine(decoder, medusa(trained[0], 4, verification=verification), **options)
    for _ in range(2):
        assert tokens(run(engine, REQUESTS)) == tokens(plain)
    assert engine.speculator.counts.accepted_tokens > 100


def test_heads_of_another_model_are_refused(decoder, tmp_path):
    rows = {"lm_head.weight": torch.zeros(5, HIDDEN), "token_map": torch.arange(5)}
    wrong = {"up.weight": torch.zeros(8, HIDDEN), "down.weight": torch.zeros(HIDDEN, 8)}
    save_file({**rows, **wrong}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="a head for a model with hidden_size"):
        load_recurrent_head(tmp_path, decoder)
    save_file(rows, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="no recurrent head"):
        load_recurrent_head(tmp_path, decoder)
    assert not is_recurrent_head(save_heads(tmp_path / "medusa", [torch.zeros(VOCAB, HIDDEN)]))
