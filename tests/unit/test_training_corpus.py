"""Texts to learn from: the user's, earlier runs', and the model's own."""

from datetime import datetime
from itertools import islice

import pytest
import torch
from small_tokenizers import byte_level
from training_models import write_small_llama

from warmroot.actors.models.loader import load_model
from warmroot.actors.runner.runner import ModelRunner
from warmroot.actors.training.corpus import Corpus, Text, Turns, read_data
from warmroot.actors.training.vocabulary import Vocabulary
from warmroot.actors.training.writer import Writer
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.kv_layout import KvLayout
from warmroot.router.chat_template import ChatTemplate


@pytest.fixture
def tokenizer():
    return byte_level()


@pytest.fixture
def turns(tokenizer):
    return Turns.of(tokenizer, ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, now=datetime.now))


def test_turns_are_what_the_template_renders(tokenizer, turns):
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, now=datetime.now)
    whole = template.render([{"role": "user", "content": "hello world"}])
    assert turns.prompt(tokenizer.encode("hello world")) == tokenizer.encode(whole)
    assert Turns.of(tokenizer, None).prompt([5]) == [tokenizer.bos_token_id, 5]


def test_a_corpus_goes_on(tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = [Text([1, 2, 3], 1), Text([4, 5], 0)]
    assert list(Corpus(path).add(texts)) == texts
    corpus = Corpus(path)
    assert corpus.texts == texts and corpus.num_written == 4
    list(corpus.add([Text([6], 0)]))
    assert Corpus(path).num_written == 5
    path.write_text('{"prompt": "no"}\n')
    with pytest.raises(ConfigError, match="not a file of texts"):
        Corpus(path)


def test_texts_that_are_measured_with_are_not_learnt_from(tmp_path):
    corpus = Corpus(tmp_path / "texts.jsonl")
    list(corpus.add(Text([index], 0) for index in range(50)))
    train, held_out = corpus.split()
    assert len(held_out) == 3 and len(train) == 47
    assert {text.token_ids[0] for text in train + held_out} == set(range(50))


def test_the_users_data(tmp_path, tokenizer, turns):
    plain = tmp_path / "book.txt"
    plain.write_text("hello world " * 5)
    texts, prompts = read_data(plain, tokenizer, turns, 4)
    assert [token for text in texts for token in text.token_ids] == tokenizer.encode("hello world " * 5)
    assert all(text.start == 0 for text in texts) and max(len(text.token_ids) for text in texts) == 4 and not prompts

    lines = tmp_path / "data.jsonl"
    lines.write_text('{"text": "the end"}\n{"prompt": "hello"}\n')
    texts, prompts = read_data(lines, tokenizer, turns, 100)
    assert texts == [Text(tokenizer.encode("the end"), 0)] and prompts == [turns.prompt(tokenizer.encode("hello"))]

    for line, message in (('{"x": 1}', "expected an object with"), ("[", "not JSON"), ("3", "expected an object")):
        lines.write_text('{"text": "the end"}\n' + line)
        with pytest.raises(ConfigError, match=f"line 2: {message}"):
            read_data(lines, tokenizer, turns, 100)


@pytest.fixture
def runner(tmp_path):
    write_small_llama(tmp_path)
    decoder = load_model(tmp_path, dtype="float32", device=torch.device("cpu"))
    return ModelRunner(decoder, KvLayout.of(decoder.spec.layer_windows, 16), 400)


@pytest.fixture
def writer(runner, turns):
    return Writer(runner, runner.decoder.spec, turns, streams=8, max_tokens=12, seed=0)


def test_a_model_without_turns_writes_texts(runner):
    writer = Writer(runner, runner.decoder.spec, Turns([7], []), streams=8, max_tokens=12, seed=0)
    texts = list(islice(writer.conversations(), 10))
    assert all(text.token_ids[0] == 7 and text.start == 1 for text in texts)


def test_the_model_writes_prompts_and_answers(writer, turns, tokenizer):
    texts = list(islice(writer.conversations(), 10))
    for text in texts:
        prompt, answer = text.token_ids[: text.start], text.token_ids[text.start :]
        assert prompt[: len(turns.opening)] == turns.opening
        said = prompt[len(turns.opening) : -len(turns.closing)]
        assert said and tokenizer.eos_token_id not in said
        assert prompt == turns.prompt(said)
        assert 1 <= len(answer) <= 12
        assert tokenizer.eos_token_id not in answer[:-1]
    assert len({tuple(text.token_ids) for text in texts}) == 10


def test_the_model_answers_prompts(writer, turns, tokenizer):
    prompts = [turns.prompt(tokenizer.encode(f"hello {index}")) for index in range(20)]
    texts = list(writer.answers(iter(prompts)))
    assert sorted(text.token_ids[: text.start] for text in texts) == sorted(prompts)


def test_the_most_frequent_tokens():
    texts = [Text([9, 9, 9, 9, 1, 1, 2], 4), Text([2, 2, 3], 0)]
    vocabulary = Vocabulary.most_frequent(texts, 10, 3, [7])
    assert vocabulary.token_map.tolist() == [1, 2, 7]
    assert vocabulary.places.tolist() == [-1, 0, 1, -1, -1, -1, -1, 2, -1, -1]
    assert vocabulary.size == 3
    assert vocabulary.coverage(texts) == pytest.approx(5 / 6)
