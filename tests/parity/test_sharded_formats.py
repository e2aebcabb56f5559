"""16-bit and quantised weights over ranks: what is the same to the bit, and what only but for rounding.

What a sequence is given does not depend on what else is in its steps, and shared memory adds up in the order of the
ranks: so a gang gives the same bits again, out of the cache or in chunks, and a pipeline gives those of one process.

Tensor parallel ranks add up in another order than one process. In float32 that is the last bit of a sum. Where such a
sum is then rounded to 8 or 16 bits (inputs of quantised weights, KV), some fall to the other side, and the difference
grows to that of the rounding: tokens may part where two are about equally likely.
"""

import pytest

from warmroot.actors.kernels.library import native
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.topology import Topology

from .conftest import Family
from .sharded_gang import ROUNDING, Outcome, assert_equal, load, random_tokens, served_by_gang, served_by_one

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")
TP2, PP2 = Topology(tp=2), Topology(pp=2)
FORMATS = {
    "float16": {"dtype": "auto"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "auto", "quantization": "int8"},
}
OF_ONE_KERNEL = ("bfloat16", "int8")
"""float16 weights are multiplied by whichever kernel is the fastest for a number of rows."""
PACKED = {"dtype": "auto", "quantization": "auto"}
PAGES = 25
EXACT = {"dtype": "float32", "kv_cache_dtype": "fp32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    Family("LlamaForCausalLM", sizes).build().half().save_pretrained(path)
    return path


def texts() -> list[GenerateRequest]:
    """Given tokens, whose log-probabilities are asked for: so that a difference has no consequences."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    return [
        GenerateRequest(
            request_id=RequestId(f"text {index}"),
            prompt_token_ids=random_tokens(index, 60),
            params=params,
        )
        for index in range(4)
    ]


def mean_difference(found: dict[str, Outcome], expected: dict[str, Outcome]) -> float:
    differences = [
        abs(mine.logprob - theirs.logprob)
        for name, outcome in expected.items()
        for mine, theirs in zip(found[name].prompt_logprobs[1:], outcome.prompt_logprobs[1:], strict=True)
    ]
    return sum(differences) / len(differences)


@pytest.mark.parametrize("name", OF_ONE_KERNEL)
def test_stages_give_the_same_bits(folder, name):
    expected = served_by_one(folder, **FORMATS[name]).run(load())
    with served_by_gang(folder, PP2, PAGES, **FORMATS[name]) as served:
        assert_equal(served.run(load()), expected, atol=0.0)


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_that_sum_differ_by_less_than_the_format_does(folder, name):
    exact, expected = (served_by_one(folder, **options).run(texts()) for options in (EXACT, FORMATS[name]))
    with served_by_gang(folder, TP2, PAGES, **FORMATS[name]) as served:
        assert mean_difference(served.run(texts()), expected) <= 0.2 * mean_difference(expected, exact)
        if name in OF_ONE_KERNEL:
            first = served.run(load())
            assert_equal(served.run(load()), first, atol=0.0)


@pytest.mark.model
def test_smollm2_as_it_is_packed(smollm2_path):
    expected = served_by_one(smollm2_path, **PACKED).run(load())
    with served_by_gang(smollm2_path, PP2, PAGES, **PACKED) as served:
        assert_equal(served.run(load()), expected, atol=0.0)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("cut", [TP2, Topology(tp=3), PP2, Topology(tp=2, pp=2)], ids=["tp2", "tp3", "pp2", "tp2-pp2"])
def test_smollm2_in_float32(smollm2_path, cut):
    expected = served_by_one(smollm2_path, **EXACT).run(load())
    with served_by_gang(smollm2_path, cut, PAGES, **EXACT) as served:
        assert_equal(served.run(load()), expected, atol=0.0 if cut == PP2 else ROUNDING)
        assert served.executor.num_restarts
