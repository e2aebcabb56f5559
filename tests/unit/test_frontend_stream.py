"""Text in, text out, over scripted tokens."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from scripted_generator import Script, ScriptedGenerator
from small_tokenizers import byte_level

from warmroot.cluster.errors import EngineError, OverloadedError
from warmroot.cluster.messages import FinishReason, GenerateRequest, TokenLogprob
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.hashing import pack_tokens
from warmroot.router.frontend import Frontend
from warmroot.router.output import OutputDelta

TOKENIZER = byte_level()
EOS = TOKENIZER.eos_token_id
assert EOS is not None


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def by_token(text: str, *, eos: bool = True, size: int = 1) -> list[list[int]]:
    tokens = ids(text) + ([EOS] if eos else [])
    return [tokens[at : at + size] for at in range(0, len(tokens), size)]


def make(script: Any, max_model_len: int = 512) -> tuple[Frontend, ScriptedGenerator]:
    generator = ScriptedGenerator(script)
    frontend = Frontend(
        generator, TOKENIZER, model="m", max_model_len=max_model_len, clock=lambda: 12.5, new_seed=lambda: 77,
        new_id=lambda: "req",
    )  # fmt: skip
    return frontend, generator


async def collect(frontend: Frontend, params: SamplingParams, prompt: str = "hello") -> list[OutputDelta]:
    return [delta async for delta in frontend.stream(ids(prompt), params)]


def text_of(deltas: list[OutputDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


async def test_stream() -> None:
    frontend, generator = make(Script(by_token("the world é"), cached_tokens=1))
    deltas = await collect(frontend, SamplingParams(max_tokens=50))
    assert [delta.text for delta in deltas] == ["the", " world", " ", "", "é", ""]
    assert [delta.num_output_tokens for delta in deltas] == [1, 2, 3, 4, 5, 6]
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["stop"]
    assert deltas[-1].token_ids == [EOS]
    assert deltas[-1].stop_reason is None
    assert (deltas[0].cached_tokens, deltas[0].replica, deltas[0].num_prompt_tokens) == (1, "r0", 1)
    assert deltas[1].cached_tokens is None
    assert (generator.finished, generator.live) == (1, 0)


async def test_what_the_engine_is_asked() -> None:
    frontend, generator = make(Script(by_token("x")), max_model_len=100)
    params = SamplingParams(stop=("z",), temperature=0.5)
    stream = frontend.stream(
        ids("hello"), params, request_id="mine", priority=3, cache_salt="tenant", tenant="t", share=2.0, timeout_s=4.0
    )
    assert generator.requests == []
    async with aclosing(stream):
        async for _ in stream:
            pass
    [request] = generator.requests
    assert request == GenerateRequest(
        request_id="mine",
        prompt_token_ids=ids("hello"),
        params=SamplingParams(temperature=0.5, max_tokens=99, seed=77),
        priority=3,
        cache_salt="tenant",
        arrival=12.5,
        tenant="t",
        share=2.0,
        deadline=16.5,
    )
    assert request.packed_prompt == pack_tokens(ids("hello"))


async def test_half_a_character_at_the_end() -> None:
    frontend, _ = make(Script([[0xE2], [0x82]], FinishReason.LENGTH))
    deltas = await collect(frontend, SamplingParams())
    assert text_of(deltas) == "\ufffd"
    assert deltas[-1].finish_reason == "length"


# Stop strings and stop tokens


async def test_stop_string_ends_and_aborts() -> None:
    frontend, generator = make(Script(by_token("the world stop here", eos=False), forever=True))
    deltas = await collect(frontend, SamplingParams(stop=("ld s", "never")))
    assert text_of(deltas) == "the wor"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "ld s")
    assert deltas[-1].num_output_tokens == 3
    assert (generator.aborted, generator.live) == (1, 0)


async def test_stop_string_is_kept_on_request() -> None:
    frontend, _ = make(Script(by_token("the world stop here")))
    params = SamplingParams(stop=("ld s",), include_stop_str_in_output=True)
    assert text_of(await collect(frontend, params)) == "the world s"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_tokens_after_a_stop_string_are_dropped(size: int) -> None:
    """However many tokens come in one delta, as with speculation."""
    frontend, _ = make(Script(by_token("the world end x y z", size=size)))
    output = await frontend.generate(ids("hello"), SamplingParams(stop=("end",), logprobs=0))
    [completion] = output.completions
    assert completion.text == "the world "
    assert completion.token_ids == ids("the world end")
    assert output.num_output_tokens == 3
    assert [entry.token for entry in completion.logprobs or ()] == ["the", " world", " end"]


async def test_text_held_back_comes_at_the_end() -> None:
    frontend, _ = make(Script(by_token("the en", eos=False), FinishReason.LENGTH))
    deltas = await collect(frontend, SamplingParams(stop=("end",)))
    assert [delta.text for delta in deltas] == ["th", "e en"]
    assert deltas[-1].finish_reason == "length"


async def test_stop_string_in_the_last_delta() -> None:
    frontend, generator = make(Script(by_token("the end", size=9)))
    deltas = await collect(frontend, SamplingParams(stop=("end",)))
    assert (text_of(deltas), deltas[-1].stop_reason) == ("the ", "end")
    assert deltas[-1].token_ids == ids("the end")
    assert generator.live == 0


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a "), (1, "a "), (2, "a b a "), (5, "a b a "), (7, "a b a b c")])
async def test_min_tokens_shield_stop_strings(min_tokens: int, text: str) -> None:
    """Tokens are characters here: "a", " ", "b" … and the string may end the output from token min_tokens + 1 on."""
    frontend, _ = make(Script([[ord(char)] for char in "a b a b c"] + [[EOS]]))
    params = SamplingParams(stop=("b",), min_tokens=min_tokens)
    expected = "a " if min_tokens < 3 else text
    assert text_of(await collect(frontend, params)) == expected


async def test_stop_token() -> None:
    world = ids(" world")[0]
    script = Script(by_token("the world", eos=False), FinishReason.STOP, stop_reason=world)
    frontend, _ = make(script)
    deltas = await collect(frontend, SamplingParams(stop_token_ids=(world,)))
    assert text_of(deltas) == "the"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", world)
    assert deltas[-1].token_ids == [world]
    included = SamplingParams(stop_token_ids=(world,), include_stop_str_in_output=True)
    assert text_of(await collect(frontend, included)) == "the world"


async def test_special_tokens() -> None:
    frontend, _ = make(Script([*by_token("a<|im_start|>b")]))
    assert text_of(await collect(frontend, SamplingParams())) == "ab"
    assert text_of(await collect(frontend, SamplingParams(skip_special_tokens=False))) == "a<|im_start|>b"


# Several choices


def numbered(request: GenerateRequest) -> Script:
    number = int(request.request_id.partition("/")[2] or 0)
    return Script(by_token(f"the {'x' * (number + 1)}"), delay=0.001 * (3 - number))


async def test_choices_come_as_they_are_ready() -> None:
    frontend, generator = make(numbered)
    deltas = await collect(frontend, SamplingParams(n=3, seed=5))
    assert [text_of(deltas, index) for index in range(3)] == ["the x", "the xx", "the xxx"]
    assert [request.request_id for request in generator.requests] == ["req", "req/1", "req/2"]
    assert [request.params.seed for request in generator.requests] == [5, 6, 7]
    assert all(request.params.n == 1 for request in generator.requests)
    finished = [delta.index for delta in deltas if delta.finish_reason is not None]
    assert sorted(finished) == [0, 1, 2]


async def test_seeds_stay_within_64_bits() -> None:
    frontend, generator = make(numbered)
    await collect(frontend, SamplingParams(n=2, seed=2**64 - 1))
    assert [request.params.seed for request in generator.requests] == [2**64 - 1, 0]


async def test_an_error_of_one_choice_cancels_the_others() -> None:
    def script(request: GenerateRequest) -> Script:
        if request.request_id == "req/1":
            return Script(by_token("ab", eos=False), delay=0.002, error=EngineError("lost"))
        return Script([[ord("a")]], delay=0.001, forever=True)

    frontend, generator = make(script, max_model_len=10**6)
    with pytest.raises(EngineError, match="lost"):
        await collect(frontend, SamplingParams(n=3))
    assert (generator.failed, generator.aborted, generator.live) == (1, 2, 0)


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_aborts_every_choice(n: int) -> None:
    frontend, generator = make(Script([[ord("a")]], delay=0.001, forever=True))
    async with aclosing(frontend.stream(ids("hello"), SamplingParams(n=n))) as stream:
        async for _ in stream:
            if generator.started == n:
                break
    assert (generator.aborted, generator.live) == (n, 0)


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_aborts_every_choice(n: int) -> None:
    frontend, generator = make(Script([[ord("a")]], delay=30.0, forever=True))
    task = asyncio.create_task(frontend.generate(ids("hello"), SamplingParams(n=n)))
    while generator.started < n:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (generator.aborted, generator.live) == (n, 0)


async def test_one_stop_string_leaves_the_other_choices_alone() -> None:
    def script(request: GenerateRequest) -> Script:
        return Script(by_token("the end stop" if request.request_id == "req" else "the world"), delay=0.001)

    frontend, generator = make(script)
    output = await frontend.generate(ids("hello"), SamplingParams(n=2, stop=("end",)))
    assert [completion.text for completion in output.completions] == ["the ", "the world"]
    assert [completion.stop_reason for completion in output.completions] == ["end", None]
    assert (generator.aborted, generator.finished) == (1, 1)


# Errors


async def test_refusals_pass() -> None:
    frontend, generator = make(Script([], error=OverloadedError("full", retry_after=2.0)))
    with pytest.raises(OverloadedError, match="full"):
        await collect(frontend, SamplingParams())
    assert generator.live == 0


async def test_engine_errors_are_raised() -> None:
    frontend, generator = make(Script(by_token("ab"), FinishReason.ERROR))
    with pytest.raises(EngineError, match="the engine failed"):
        await collect(frontend, SamplingParams())
    assert generator.live == 0


async def test_an_end_without_a_reason_is_an_error() -> None:
    class Silent:
        async def generate(self, request: GenerateRequest) -> Any:
            for nothing in ():
                yield nothing

    frontend = Frontend(Silent(), TOKENIZER, model="m", max_model_len=99)
    with pytest.raises(EngineError, match="without a finish reason"):
        await collect(frontend, SamplingParams())


# Whole outputs


async def test_generate() -> None:
    prompt_logprobs = [None, TokenLogprob(7, -0.5, 1)]
    frontend, _ = make(Script(by_token("the world"), cached_tokens=2, prompt_logprobs=prompt_logprobs))
    output = await frontend.generate(ids("hello stop"), SamplingParams(logprobs=1))
    [completion] = output.completions
    assert (completion.text, completion.token_ids) == ("the world", [*ids("the world"), EOS])
    assert (completion.finish_reason, completion.cumulative_logprob) == ("stop", -3.0)
    assert output.text == "the world"
    assert (output.num_prompt_tokens, output.num_output_tokens, output.cached_tokens) == (2, 3, 2)
    assert (output.request_id, output.replica) == ("req", "r0")
    assert completion.logprobs is not None
    entry = completion.logprobs[1]
    assert (entry.token, entry.token_bytes, entry.top_tokens, entry.rank) == (" world", b" world", (" world",), 1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1].logprob == -0.5  # type: ignore[union-attr]


async def test_no_logprobs_unless_asked() -> None:
    frontend, _ = make(Script(by_token("the")))
    output = await frontend.generate(ids("hello"), SamplingParams())
    assert output.completions[0].logprobs is None
    assert output.completions[0].cumulative_logprob is None


@pytest.mark.parametrize(
    "params", [SamplingParams(n=3), SamplingParams(n=2, stop=("xx",)), SamplingParams(max_tokens=2)]
)
async def test_counts_are_the_same_with_and_without_a_stream(params: SamplingParams) -> None:
    frontend, _ = make(numbered)
    deltas = await collect(frontend, params)
    last = {delta.index: delta.num_output_tokens for delta in deltas}
    output = await frontend.generate(ids("hello"), params)
    assert sum(last.values()) == output.num_output_tokens == sum(len(c.token_ids) for c in output.completions)
    assert {delta.num_prompt_tokens for delta in deltas} == {output.num_prompt_tokens}
    assert [text_of(deltas, c.index) for c in output.completions] == [c.text for c in output.completions]


async def test_best_of() -> None:
    """The mean counts, not the sum: the second choice is longer and likelier per token."""
    means = {"req": -2.0, "req/1": -1.5, "req/2": -3.0}

    def script(request: GenerateRequest) -> Script:
        tokens = ids("the world stop" if request.request_id == "req/1" else "the")
        logprobs = [TokenLogprob(token, means[request.request_id], 1) for token in tokens]
        return Script([[token] for token in tokens], FinishReason.LENGTH, logprobs=logprobs)

    frontend, generator = make(script)
    output = await frontend.generate(ids("hello"), SamplingParams(n=2, best_of=3))
    assert [completion.text for completion in output.completions] == ["the world stop", "the"]
    assert [completion.index for completion in output.completions] == [0, 1]
    assert all(completion.logprobs is None for completion in output.completions)
    assert output.num_output_tokens == 5
    assert generator.started == 3
    asked = await frontend.generate(ids("hello"), SamplingParams(n=1, best_of=3, logprobs=0))
    assert asked.completions[0].cumulative_logprob == -4.5
