"""What is refused before a token is made, and what is filled in."""

from typing import Any

import pytest
from scripted_generator import Script, ScriptedGenerator
from small_tokenizers import byte_level, sentencepiece, word_level

from warmroot.cluster.errors import ContextTooLongError, InvalidRequestError
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.hashing import pack_tokens
from warmroot.router.frontend import Frontend
from warmroot.router.request_checks import packed_prompt
from warmroot.router.tokenizer import Tokenizer

TOKENIZER = byte_level()
OUTSIDE = TOKENIZER.vocab_size


def make(tokenizer: Tokenizer = TOKENIZER, **options: Any) -> tuple[Frontend, ScriptedGenerator]:
    generator = ScriptedGenerator(Script([[1]]))
    return Frontend(generator, tokenizer, **{"model": "tiny", "max_model_len": 32, **options}), generator


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([], {}, "prompt", "at least one token"),
        ([1, OUTSIDE], {}, "prompt", f"token id {OUTSIDE} in prompt is outside the vocabulary"),
        ([1, -1], {}, "prompt", "token id -1"),
        ([1], {"logit_bias": {OUTSIDE: 1.0}}, "logit_bias", "outside the vocabulary"),
        ([1], {"stop_token_ids": (OUTSIDE,)}, "stop_token_ids", "outside the vocabulary"),
        ([1], {"allowed_token_ids": (3, OUTSIDE)}, "allowed_token_ids", "outside the vocabulary"),
        ([1] * 30, {"min_tokens": 5}, "min_tokens", "must not exceed"),
        ([1], {"n": 1, "best_of": 2}, "best_of", "cannot be streamed"),
    ],
)
def test_refused_at_once(prompt: list[int], params: dict[str, Any], param: str, words: str) -> None:
    frontend, generator = make()
    with pytest.raises(InvalidRequestError, match=words) as caught:
        frontend.stream(prompt, SamplingParams(**params))
    assert caught.value.param == param
    assert generator.requests == []


@pytest.mark.parametrize("priority", [2**31, -(2**31), 2**64, -(10**30)])
def test_a_priority_that_no_wire_carries_is_refused(priority: int) -> None:
    frontend, generator = make()
    with pytest.raises(InvalidRequestError, match="between -2147483647 and 2147483647") as caught:
        frontend.stream([1], SamplingParams(), priority=priority)
    assert caught.value.param == "priority"
    assert generator.requests == []


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "words"),
    [
        (33, None, "maximum context length is 32 tokens. However, your prompt has 33 tokens"),
        (32, None, "your prompt has 32 tokens"),
        (32, 1, "your prompt has 32 tokens"),
        (20, 13, r"you requested 33 tokens \(20 in the prompt, 13 in the completion\)"),
    ],
)
def test_context_too_long(num_prompt: int, max_tokens: int | None, words: str) -> None:
    frontend, _ = make()
    with pytest.raises(ContextTooLongError, match=words) as caught:
        frontend.stream([1] * num_prompt, SamplingParams(max_tokens=max_tokens))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("num_prompt", "wanted", "asked"), [(20, None, 12), (20, 12, 12), (31, None, 1), (32, 0, 0)])
async def test_max_tokens(num_prompt: int, wanted: int | None, asked: int) -> None:
    frontend, generator = make()
    await frontend.generate([1] * num_prompt, SamplingParams(max_tokens=wanted))
    assert generator.requests[0].params.max_tokens == asked


async def test_best_of_equal_to_n_can_be_streamed() -> None:
    frontend, generator = make()
    assert [delta.index async for delta in frontend.stream([1], SamplingParams(n=1, best_of=1))] == [0]
    assert generator.requests[0].params.best_of is None


async def test_padded_vocabulary() -> None:
    frontend, _ = make(vocab_size=OUTSIDE + 10)
    output = await frontend.generate([OUTSIDE + 9], SamplingParams())
    assert output.num_prompt_tokens == 1


async def test_bad_words() -> None:
    frontend, generator = make()
    params = SamplingParams(bad_words=("world", " stop", "xy"), bad_words_token_ids=((5,),))
    await frontend.generate([1], params)
    sent = generator.requests[0].params
    spellings = ("world", " world", "stop", " stop", "xy", " xy")
    assert sent.bad_words == ()
    assert sent.bad_words_token_ids == ((5,), *(tuple(TOKENIZER.encode(text)) for text in spellings))


async def test_different_requests_draw_different_seeds() -> None:
    frontend, generator = make()
    for _ in range(2):
        await frontend.generate([1], SamplingParams())
    first, second = (request.params.seed for request in generator.requests)
    assert first != second
    assert generator.requests[0].request_id != generator.requests[1].request_id


def test_tokenize() -> None:
    frontend, _ = make()
    assert frontend.tokenize("hello") == TOKENIZER.encode("hello")
    assert frontend.tokenize([3, 4]) == [3, 4]


def test_render() -> None:
    frontend, _ = make()
    messages = [{"role": "user", "content": "hello"}]
    text = "<|im_start|>user\nhello<|im_end|>\n"
    assert frontend.render(messages) == TOKENIZER.encode(text + "<|im_start|>assistant\n")
    assert frontend.render(messages, add_generation_prompt=False) == TOKENIZER.encode(text)
    messages.append({"role": "assistant", "content": "the"})
    opened = frontend.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert opened == TOKENIZER.encode(text + "<|im_start|>assistant\nthe")


def test_template_variables_and_clock() -> None:
    tokenizer = byte_level("{{ strftime_now('%Y') }} {{ mood }} {{ eos_token }}")
    frontend, _ = make(tokenizer, clock=lambda: 86400.0 * 365 * 3)
    ids = frontend.render([{"role": "user", "content": "x"}], chat_template_kwargs={"mood": "calm"})
    assert ids == tokenizer.encode("1972 calm <|im_end|>")


@pytest.mark.parametrize("tokenizer", [sentencepiece(), word_level()])
def test_no_template(tokenizer: Tokenizer) -> None:
    frontend, _ = make(tokenizer)
    with pytest.raises(InvalidRequestError, match=r"tiny has no chat template.*--chat-template"):
        frontend.render([{"role": "user", "content": "x"}])


def test_a_prompt_is_packed_as_it_is_checked() -> None:
    ids = [1, 2, 300]
    assert packed_prompt(ids, 301) == pack_tokens(ids) == b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0"
    with pytest.raises(InvalidRequestError, match="token id 300 "):
        packed_prompt(ids, 300)
    with pytest.raises(InvalidRequestError, match="token id 4294967296 "):
        packed_prompt([1, 2**32], 300)
