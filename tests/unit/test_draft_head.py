"""Drafting models whose head has only some of the tokens."""

import pytest
import torch
from safetensors.torch import save_file
from training_models import VOCAB, write_small_llama

from warmroot.actors.models.draft_head import DRAFT_HEAD, ReducedHead, load_draft_model
from warmroot.actors.models.loader import load_model
from warmroot.cluster.errors import ModelLoadError

CPU = torch.device("cpu")
KEPT = torch.tensor([3, 5, 8, 100, 319])


@pytest.fixture
def folder(tmp_path):
    write_small_llama(tmp_path)
    return tmp_path


def write_head(folder, rows=5, token_map=KEPT):
    torch.manual_seed(0)
    weight = torch.randn(rows, 32).half()
    save_file({"lm_head.weight": weight, "token_map": token_map}, folder / DRAFT_HEAD)
    return weight.float()


def test_without_the_file_it_is_an_ordinary_model(folder):
    hidden = torch.randn(4, 32)
    draft, plain = (load(folder, dtype="float32", device=CPU) for load in (load_draft_model, load_model))
    assert torch.equal(draft.logits(hidden), plain.logits(hidden))


def test_logits_of_the_tokens_that_it_has(folder):
    weight = write_head(folder)
    draft = load_draft_model(folder, dtype="float32", device=CPU)
    hidden = torch.randn(4, 32)
    logits = draft.logits(hidden)
    assert logits.shape == (4, VOCAB)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[:, KEPT], hidden @ weight.T, rtol=0.0, atol=0.2)  # 8 bits
    others = torch.ones(VOCAB, dtype=torch.bool)
    others[KEPT] = False
    assert (logits.softmax(1)[:, others] == 0).all()
    assert logits.isfinite().all(), "a request may allow none of its tokens"


@pytest.mark.parametrize(
    ("rows", "token_map"), [(4, KEPT), (5, KEPT + 1), (5, KEPT - 4)], ids=["shape", "too high", "too low"]
)
def test_a_head_that_does_not_fit_is_refused(folder, rows, token_map):
    write_head(folder, rows, token_map)
    with pytest.raises(ModelLoadError, match="do not fit the model"):
        load_draft_model(folder, dtype="float32", device=CPU)


def test_a_file_of_something_else_is_refused(folder):
    save_file({"lm_head.weight": torch.zeros(2, 32)}, folder / DRAFT_HEAD)
    with pytest.raises(ModelLoadError, match="token_map cannot be read"):
        load_draft_model(folder, dtype="float32", device=CPU)


def test_rows_do_not_share_memory():
    """Who draws from logits overwrites them."""

    class Zeros:
        def apply(self, x):
            return torch.zeros(len(x), len(KEPT))

    head = ReducedHead(Zeros(), KEPT, VOCAB)
    first = head.apply(torch.zeros(1, 32))
    first.exp_()
    assert head.apply(torch.zeros(1, 32)).min() < -1e20
