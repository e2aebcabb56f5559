"""Guides: what a grammar allows, on a vocabulary of bytes and on random logits."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from openai_harness import END, byte_tokenizer

from warmroot.actors.engine.draft_tree import Draft
from warmroot.actors.engine.plan import NewSequence, SequenceResult, StepPlan
from warmroot.actors.runner.guides import Guide, Guides
from warmroot.actors.runner.rows import SamplingRow
from warmroot.actors.runner.sampler import Sampler
from warmroot.actors.runner.sequences import SequenceTable
from warmroot.actors.runner.verify import drafted_rows
from warmroot.cluster.ids import RequestId
from warmroot.cluster.output_grammar import OutputGrammar
from warmroot.cluster.sampling_params import SamplingParams

VOCAB = 260
"""The model has more rows than the tokenizer has tokens."""
DATE = OutputGrammar("regex", r"\d{4}-\d\d(-\d\d)?")
PROMPT = [1, 2, 3]


class Sequence:
    """One output under a grammar, on random logits."""

    def __init__(self, grammar: OutputGrammar, output: str = "", guides: Guides | None = None, seed: int = 0) -> None:
        self.guides = guides or Guides(byte_tokenizer, VOCAB, (END,))
        self.table = SequenceTable(1)
        self.params = SamplingParams(grammar=grammar, seed=seed)
        self.output = list(output.encode())
        self.id = RequestId(f"r{seed}")
        new = NewSequence(
            request_id=self.id,
            token_ids=[*PROMPT, *self.output],
            num_prompt_tokens=len(PROMPT),
            params=self.params,
            seed=seed,
            num_computed=0,
            block_tables=([1],),
        )
        self.table.add(new)
        self.guides.begin(self.table, StepPlan(step=1, new=(new,)))
        self.state = self.table[self.id]

    @property
    def guide(self) -> Guide:
        assert self.state.guide is not None
        return self.state.guide

    def logits(self, rows: int = 1) -> torch.Tensor:
        seed = len(self.output) + 1000 * self.state.seed
        return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2

    def step(self, change: Callable[[torch.Tensor], None] = lambda logits: None) -> SequenceResult:
        row = SamplingRow(self.params, self.state.seed, len(PROMPT), self.table.history(self.state), self.guide)
        logits = self.logits()
        change(logits)
        [token_id] = Sampler((END,)).sample(logits, [row]).token_ids
        self.table.append([self.state], [token_id])
        self.output.append(token_id)
        [result] = self.guides.follow([SequenceResult(request_id=self.id, token_ids=[token_id])])
        return result

    def text(self, most: int = 200) -> str:
        while len(self.output) < most and (not self.output or self.output[-1] != END):
            assert self.step().error is None
        return bytes(self.output[:-1]).decode()

    def allowed(self, ahead: str = "") -> set[str]:
        logits = torch.zeros(VOCAB)
        self.guide.mask(logits, np.array([*self.output, *ahead.encode()], np.int32))
        return {chr(token) if token < END else "END" for token in torch.isfinite(logits).nonzero().flatten().tolist()}


@pytest.mark.parametrize("seed", range(5))
def test_random_logits_give_what_the_expression_matches(seed):
    assert re.fullmatch(DATE.text, Sequence(DATE, seed=seed).text())


def test_what_may_come_next():
    assert Sequence(DATE, "2026-1").allowed() == set("0123456789")
    assert Sequence(DATE, "2026-11").allowed() == {"-", "END"}
    assert Sequence(DATE, "2026-11-30").allowed() == {"END"}


@pytest.mark.parametrize(
    ("grammar", "first"),
    [
        (OutputGrammar.choice(["yes", "no", 'a "b"\n\u00e9']), {"y", "n", "a"}),
        (OutputGrammar("grammar", 'root ::= "a" root | "b"'), {"a", "b"}),
        (OutputGrammar("lark", 'start: "x" | /[0-9]/'), set("x0123456789")),
        (OutputGrammar.json_schema({"type": "object"}), {"{"}),
        (OutputGrammar.json_schema({"type": "boolean"}), {"t", "f"}),
    ],
)
def test_kinds(grammar, first):
    assert Sequence(grammar).allowed() == first


def test_choice_with_quotes_and_letters_of_two_bytes():
    texts = ["yes", 'a "b"\n\u00e9']
    assert {Sequence(OutputGrammar.choice(texts), seed=seed).text() for seed in range(12)} == set(texts)


def test_guesses_are_looked_past_and_forgotten():
    sequence = Sequence(DATE, "20")
    assert sequence.allowed("26-1") == set("0123456789")
    assert sequence.allowed("26-11") == {"-", "END"}
    assert sequence.allowed() == set("0123456789")


def test_behind_a_wrong_guess_nothing_is_masked_and_nothing_breaks():
    sequence = Sequence(DATE, "20")
    assert len(sequence.allowed("x")) == len(sequence.allowed("2x")) == END + 1
    assert sequence.allowed() == set("0123456789")


@pytest.mark.parametrize("draft", [Draft(tuple(b"26-")), Draft((*b"2x6", END)), Draft((*b"26-11-30", END))])
def test_rows_of_a_draft(draft):
    """Each row is what it is if the guesses before it had been sampled."""
    sequence = Sequence(DATE, "20")
    sequence.table.note(sequence.state, 0, draft.token_ids)
    rows = drafted_rows(sequence.state, draft, sequence.table.history)
    chosen = Sampler((END,)).sample(sequence.logits(len(rows)), rows).token_ids
    for place in draft.standing(chosen):
        assert chosen[place] == draft.token_ids[place]
    one_by_one = Sequence(DATE, "20")
    for place in range(len(draft.standing(chosen)) + 1):
        ahead = bytes(draft.token_ids[:place]).decode() if END not in draft.token_ids[:place] else None
        if ahead is not None:
            token = chosen[place]
            assert ("END" if token == END else chr(token)) in one_by_one.allowed(ahead)


def test_rows_of_a_tree():
    sequence = Sequence(DATE, "20")
    draft = Draft(tuple(b"2x6"), (-1, -1, 0))
    rows = drafted_rows(sequence.state, draft, sequence.table.history)
    logits = torch.zeros(4, VOCAB)
    for row, row_logits in zip(rows, logits, strict=True):
        assert row.guide is not None
        row.guide.mask(row_logits, row.output)
    digits, hyphen = list(b"0123456789"), list(b"-")
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == digits
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == digits
    assert torch.isfinite(logits[3]).nonzero().flatten().tolist() == hyphen


def test_several_tokens_at_once_up_to_the_end():
    sequence = Sequence(DATE, "20")
    accepted = SequenceResult(request_id=sequence.id, token_ids=[*b"26-11", END, *b"zz"])
    assert sequence.guides.follow([accepted]) == [accepted]


def test_a_sequence_that_comes_again_goes_on_where_it_was():
    whole = Sequence(DATE, seed=3)
    text = whole.text()
    for cut in range(len(text)):
        assert Sequence(DATE, text[:cut], guides=whole.guides, seed=3).text() == text


def test_one_grammar_is_compiled_once():
    guides = Guides(byte_tokenizer, VOCAB, (END,))
    first, second = (Sequence(DATE, guides=guides, seed=seed) for seed in (1, 2))
    assert re.fullmatch(DATE.text, first.text())
    assert re.fullmatch(DATE.text, second.text())
    assert len(guides._compiled) == 1


def test_nothing_left_to_choose_ends_the_sequence_with_an_error():
    sequence = Sequence(DATE)
    banned = list(b"0123456789")
    result = sequence.step(lambda logits: logits[:, banned].fill_(0))
    assert result.error is None
    sequence.params = SamplingParams(grammar=DATE, allowed_token_ids=(ord("x"),))
    result = sequence.step()
    assert result.token_ids == []
    assert result.error == "no token is allowed by both the grammar and the other parameters"


def test_a_grammar_that_is_none_ends_the_sequence_with_an_error():
    sequence = Sequence(OutputGrammar("regex", "("))
    result = sequence.step()
    assert result.token_ids == []
    assert "unclosed group" in (result.error or "")


def test_an_output_that_does_not_belong_ends_with_an_error():
    assert Sequence(DATE, "x").step().error == "the output so far does not belong to the grammar"


def test_ended_sequences_are_forgotten():
    sequence = Sequence(DATE)
    sequence.guides.begin(sequence.table, StepPlan(step=2, finished=(sequence.id,)))
    results = [SequenceResult(request_id=sequence.id, token_ids=[5])]
    assert sequence.guides.follow(results) is results
