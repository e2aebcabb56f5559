"""What is trained: the draft against transformers, targets and their loss, heads, the loop and its state."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from training_models import VOCAB, write_small_llama

from warmroot.actors.models.draft_head import load_draft_model
from warmroot.actors.models.loader import load_model
from warmroot.actors.training.corpus import Text
from warmroot.actors.training.draft import DraftTask, draft_acceptance, start_draft, write_draft
from warmroot.actors.training.draft_net import LayerChoice, check_layers
from warmroot.actors.training.features import TOP, Features
from warmroot.actors.training.medusa_heads import MedusaHeads, MedusaTask, head_accuracy, write_heads
from warmroot.actors.training.model_parts import head_rows
from warmroot.actors.training.targets import Targets
from warmroot.actors.training.trainer import Schedule, Trainer
from warmroot.actors.training.vocabulary import Vocabulary
from warmroot.cluster.errors import ConfigError

CPU = torch.device("cpu")
TEXTS = [Text([5, 6, 7, 8, 9, 10, 11, 12, 40], 3), Text([100, 101, 102, 103], 0), Text([6, 7, 8, 9, 10, 11], 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, write_small_llama(folder)


@pytest.fixture(scope="module")
def features(model):
    decoder = load_model(model[0], dtype="float32", device=CPU)
    done = []
    found = Features.of(decoder, TEXTS, done.append)
    assert done == [1, 2, 3]
    return found


def vocabulary(size: int = VOCAB) -> Vocabulary:
    return Vocabulary.most_frequent(TEXTS, VOCAB, size, [])


def reference(model, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of the rows that count."""
    with torch.no_grad():
        output = model(torch.tensor([text.token_ids]), output_hidden_states=True)
    first = max(0, text.start - 1)
    return output.hidden_states[-1][0, first:], output.logits[0, first:]


def test_features_are_what_the_model_says(model, features, tmp_path):
    assert features.left.tolist() == [6, 5, 4, 3, 2, 1, 0, 3, 2, 1, 0, 4, 3, 2, 1, 0]
    for index, text in enumerate(TEXTS):
        hidden, logits = reference(model[1], text)
        rows = features.rows(index)
        torch.testing.assert_close(features.hidden[rows].float(), hidden, rtol=2e-3, atol=2e-3)
        probs, ids = logits.softmax(1).topk(TOP)
        assert torch.equal(features.top_ids[rows][:, 0], ids[:, 0].int())
        torch.testing.assert_close(features.top_probs[rows].float(), probs, rtol=2e-2, atol=1e-3)
    features.save(tmp_path / "features")
    for loaded, saved in zip(parts_of(Features.load(tmp_path / "features")), parts_of(features), strict=True):
        assert torch.equal(loaded, saved)


def parts_of(features: Features) -> list[torch.Tensor]:
    return [features.hidden, features.top_ids, features.top_probs, features.left, features.firsts]


def test_the_loss_is_the_cross_entropy_with_the_models_distribution():
    torch.manual_seed(0)
    logits, p = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6).softmax(1)
    probs, places = p.topk(6)
    loss, expected = Targets(places, probs).loss(logits), F.cross_entropy(logits, p)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(2 * value, logits)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients)
    places = places.clone()
    places[:, 1] = -1  # not in the vocabulary
    kept = F.log_softmax(logits, 1).gather(1, places.clamp(min=0))
    loss, expected = Targets(places, probs).loss(logits), -(kept * probs)[:, [0, 2, 3, 4, 5]].sum() / 4
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


def test_agreement_is_what_rejection_sampling_accepts():
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.3, 0.6, 0.1]])
    agrees, overlap = Targets(torch.tensor([[0, 1, 2]]), p).agreement(q.log())
    assert agrees.tolist() == [False]
    assert overlap.item() == pytest.approx(0.3 + 0.2 + 0.1)
    agrees, overlap = Targets(torch.tensor([[1, -1, 2]]), p).agreement(q.log())
    assert agrees.tolist() == [True]
    assert overlap.item() == pytest.approx(0.6 + 0.1)


def test_a_draft_of_all_layers_is_the_model(model, features):
    net = start_draft(model[0], LayerChoice((0, 1, 2)), vocabulary())
    for text in TEXTS:
        hidden = net(torch.tensor([text.token_ids]))[0, max(0, text.start - 1) :]
        expected_hidden, expected_logits = reference(model[1], text)
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-3, atol=1e-3)
        order = vocabulary().token_map
        torch.testing.assert_close(net.lm_head(hidden), expected_logits[:, order], rtol=1e-3, atol=1e-3)
    figures = draft_acceptance(DraftTask(net, TEXTS, features, vocabulary()))
    assert figures["greedy"] == figures["accepted"][0] == 1.0
    assert figures["accepted"][1] == pytest.approx(13 / 16)


def test_layers_that_a_draft_starts_from(model):
    assert LayerChoice.spread(1, 30).layers == (0,)
    assert LayerChoice.spread(2, 30).layers == (0, 29)
    assert LayerChoice.spread(4, 30).layers == (0, 10, 19, 29)
    for count in (0, 3):
        with pytest.raises(ConfigError, match="--layers: must be between 1 and 2"):
            LayerChoice.spread(count, 3)
    net = start_draft(model[0], LayerChoice.spread(2, 3), vocabulary())
    assert torch.equal(net.model.layers[1].mlp.up_proj.weight, model[1].model.layers[2].mlp.up_proj.weight)
    spec = load_model(model[0], dtype="float32", device=CPU).spec
    check_layers(spec)


@pytest.mark.parametrize("size", [16, VOCAB])
def test_what_is_written_is_what_was_trained(model, tmp_path, size):
    words = vocabulary(size)
    net = start_draft(model[0], LayerChoice.spread(2, 3), words)
    nn.init.normal_(net.lm_head.weight)
    write_draft(tmp_path, net, words)
    decoder = load_draft_model(tmp_path, dtype="float32", device=CPU)
    assert decoder.spec.num_layers == 2 and decoder.spec.tie_embeddings is (size < VOCAB)
    hidden = torch.randn(3, 32)
    logits = decoder.logits(hidden)
    torch.testing.assert_close(logits[:, words.token_map], net.lm_head(hidden), rtol=0.0, atol=0.2)  # 8 bits
    assert load_model(tmp_path, dtype="float32", device=CPU).logits(hidden).shape == (3, VOCAB), "usable alone"


def test_heads_start_as_the_models_own_and_learn_the_right_places(model, features):
    words = vocabulary(16)
    rows = head_rows(model[0], words.token_map)
    heads = MedusaHeads(rows, 2)
    hidden = features.hidden[:3].float()
    torch.testing.assert_close(heads(hidden, 1), hidden @ rows.T)

    task = MedusaTask(heads, features, words)
    losses = [
        Targets.of(features, torch.tensor([2 + 1 + index]), words).loss(features.hidden[2:3].float() @ rows.T)
        for index in range(2)
    ]
    torch.testing.assert_close(task.loss(torch.tensor([2])), (losses[0] + 0.8 * losses[1]) / 1.8)
    # The last row of a text has nothing to guess, and the one before only its successor's.
    alone = Targets.of(features, torch.tensor([6]), words).loss(features.hidden[5:6].float() @ rows.T)
    torch.testing.assert_close(task.loss(torch.tensor([5, 6])), alone / 1.8)


def test_head_accuracy_counts_guesses_in_a_row(features):
    """Heads that are right by construction: one-hot states, and output rows that name the tokens that follow."""
    top = features.top_ids[:, 0].long()
    words = Vocabulary(torch.arange(VOCAB), torch.arange(VOCAB))
    for wrong, accepted in (((), [1.0, 1.0]), ((1,), [1.0, 0.0]), ((0,), [0.0, 0.0])):
        for row in torch.nonzero(features.left >= 2).flatten().tolist():
            one = Features(
                torch.full((3, 1), float(row)),
                *(part[row : row + 3] for part in (features.top_ids, features.top_probs)),
                left=torch.tensor([2, 1, 0]),
                firsts=torch.tensor([0]),
            )
            figures = head_accuracy(MedusaTask(Told(top, wrong), one, words), ranks=2)
            assert figures["accepted"] == accepted
            assert figures["tokens_per_step"] == 1 + sum(accepted)


class Told(nn.Module):
    """Two heads: right, but for those that are ``wrong``."""

    blocks = range(2)

    def __init__(self, top: torch.Tensor, wrong: tuple[int, ...]) -> None:
        super().__init__()
        self.top, self.wrong = top, wrong

    def forward(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        guess = (self.top[int(hidden[0, 0]) + head + 1] + (head in self.wrong)) % VOCAB
        return F.one_hot(guess[None], VOCAB).float()


def test_heads_are_written_with_vllms_names(model, tmp_path):
    words = vocabulary(16)
    heads = MedusaHeads(head_rows(model[0], words.token_map), 3)
    write_heads(tmp_path, heads, words)
    config = json.loads((tmp_path / "config.json").read_text())
    facts = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": VOCAB}
    assert config.items() >= {**facts, "truncated_vocab_size": 16, "original_lm_head": True}.items()
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {f"blocks.{index}.layers.0.{part}": shape for index in range(3) for part, shape in PARTS}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        **shapes,
        "lm_head.weight": [16, 32],
        "token_map": [16],
    }
    assert torch.equal(tensors["token_map"], words.token_map)


PARTS = (("weight", [32, 32]), ("bias", [32]))


class Line:
    """y = w x, to be learnt."""

    num_examples = 64

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(4, 1, bias=False)
        self.x = torch.randn(64, 4)
        self.y = self.x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
        self.seen: list[int] = []

    def loss(self, rows):
        self.seen += rows.tolist()
        return F.mse_loss(self.module(self.x[rows]), self.y[rows])


class Ticks:
    """A second for every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def trainer(line: Line, path, **schedule) -> Trainer:
    values = {"seconds": 1e9, "epochs": 40, "batch_size": 16, "learning_rate": 0.1} | schedule
    return Trainer(line.module, line, Schedule(**values), path / "state.pt", Ticks())


def test_training_learns_and_sees_every_example_once_an_epoch(tmp_path):
    line = Line()
    found = trainer(line, tmp_path)
    steps = list(found.run())
    assert len(steps) == 160 and steps[-1].done == 1.0 and found.epochs == 40
    assert all(sorted(line.seen[start : start + 64]) == list(range(64)) for start in range(0, 2560, 64))
    assert line.seen[:64] != line.seen[64:128]
    assert steps[-1].loss < 0.05 < steps[0].loss


def test_training_ends_when_its_time_is_up(tmp_path):
    steps = list(trainer(Line(), tmp_path, seconds=10.0).run())
    assert len(steps) == 10 and steps[-1].seconds == 10.0


def test_training_goes_on_where_it_was(tmp_path):
    whole = Line()
    list(trainer(whole, tmp_path).run())
    (tmp_path / "state.pt").unlink()

    first = Line()
    running = trainer(first, tmp_path)
    for step, _ in enumerate(running.run(), 1):
        if step == 70:
            running.save()
            break
    second = Line()
    resumed = trainer(second, tmp_path)
    assert resumed.epochs == 70 / 4 and len(resumed.losses) == 70
    list(resumed.run())
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.module.weight, whole.module.weight)

    other = Line()
    other.module = nn.Linear(5, 1, bias=False)
    with pytest.raises(ConfigError, match="state of another training"):
        trainer(other, tmp_path)


def test_the_rate_rises_and_falls():
    schedule = Schedule(seconds=1, epochs=1, batch_size=1, learning_rate=2.0)
    rates = [schedule.rate(done / 100) for done in range(101)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == pytest.approx(2.0, rel=0.01) and rates[100] < 0.05
    assert rates[:4] == sorted(rates[:4]) and rates[4:] == sorted(rates[4:], reverse=True)
