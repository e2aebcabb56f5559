"""Where engines over several ranks tend to break: the smallest and the longest of everything."""

import pytest

from warmroot.cluster.errors import InvalidRequestError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.topology import Topology

from .conftest import FAMILIES
from .sharded_gang import SHARED, assert_equal, load, random_tokens, served_by_gang, served_by_one

TP2, PP2, TP2_PP2 = Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2)
PLENTY = 400
FAMILY = {TP2: "llama-yarn-rope", PP2: "gemma2", TP2_PP2: "qwen2"}
"""Of uneven heads, of two kinds of layers, and of more stages of windows than of others."""
CUT_IDS = ["tp2", "pp2", "tp2-pp2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the model that is cut so."""
    folders = {}
    for cut, name in FAMILY.items():
        folders[cut] = tmp_path_factory.mktemp(name)
        FAMILIES[name].build().save_pretrained(folders[cut])
    return folders.__getitem__


@pytest.fixture(scope="module", params=FAMILY, ids=CUT_IDS)
def cut(request) -> Topology:
    return request.param


@pytest.fixture(scope="module")
def gang(folder, cut):
    """One for several tests, with pages for all."""
    with served_by_gang(folder(cut), cut, PLENTY) as served:
        yield served


@pytest.fixture(scope="module")
def expected(folder):
    return {cut: served_by_one(folder(cut)).run(load()) for cut in FAMILY}.__getitem__


def ask(name: str, prompt: list[int], **params) -> GenerateRequest:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
    return GenerateRequest(request_id=RequestId(name), prompt_token_ids=prompt, params=SamplingParams(**params))


SMALL = {
    "a block for each token": ({"block_size": 1}, TP2_PP2),
    "one sequence": ({"max_num_seqs": 1}, PP2),
    "chunks of a token": ({"max_prefill_chunk": 1}, PP2),
    "steps of a token": ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, TP2),
    "no cache": ({"enable_prefix_caching": False, "max_num_batched_tokens": 1000}, TP2_PP2),
}
"""And the cut that runs every time."""


@pytest.mark.parametrize(
    ("cut", "options"),
    [
        pytest.param(cut, options, id=f"{name}-{cut_id}", marks=() if cut == always else pytest.mark.slow)
        for name, (options, always) in SMALL.items()
        for cut, cut_id in zip(FAMILY, CUT_IDS, strict=True)
    ],
)
def test_small_sizes(folder, expected, cut, options):
    with served_by_gang(folder(cut), cut, PLENTY, **options) as served:
        assert_equal(served.run(load()), expected(cut))


def test_a_prompt_that_fills_the_context_on_the_last_page(folder, cut):
    """Many more chunks than plans in flight, and then preempted by one that came before it."""
    long = [ask("long", random_tokens(0, 110), logprobs=0, max_tokens=18), ask("short", random_tokens(1, 3))]
    expected = served_by_one(folder(cut), max_model_len=128).run(long)
    pages = 1 + 128 // 4 * len(served_by_one(folder(cut)).executor.layout.groups)
    with served_by_gang(folder(cut), cut, pages, max_model_len=128, max_num_batched_tokens=8) as served:
        assert_equal(served.run(long), expected)
        assert max(len(plan.sequences) for plan in served.executor.plans) > 1


def test_all_but_the_last_token_are_cached(gang):
    request = [ask("again", SHARED, logprobs=1)]
    first, second = gang.run(request), gang.run(request)
    assert (first["again"].cached, second["again"].cached) == (0, len(SHARED) - 1)
    assert_equal(second, first)


def test_ends_that_nobody_foresees_while_others_are_under_way(folder, cut, gang):
    """Every request ends at the first of its tokens that is a stop token, and none hears another's tokens."""
    requests = [ask(f"{index}", random_tokens(index, 5 + index), max_tokens=12) for index in range(6)]
    whole = served_by_one(folder(cut)).run(requests)
    stops = {name: outcome.tokens[2 + int(name)] for name, outcome in whole.items()}
    requests = [
        ask(f"{index}", random_tokens(index, 5 + index), max_tokens=12, stop_token_ids=(stops[f"{index}"],))
        for index in range(6)
    ]
    for name, outcome in gang.run(requests).items():
        tokens = whole[name].tokens
        assert outcome.tokens == tokens[: tokens.index(stops[name]) + 1]
        assert outcome.reason == FinishReason.STOP


def test_a_name_that_is_used_again_at_once(folder, cut, gang):
    """A client leaves while its request is in flight, and asks for something else by the same name."""
    first, second = ask("same", random_tokens(0, 60)), ask("same", random_tokens(1, 9))
    engine = gang.engine
    engine.add(first)
    assert engine.begin_all()
    engine.abort(first.request_id)
    with pytest.raises(InvalidRequestError, match="is running already"):
        engine.add(second)
    while engine.num_in_flight:
        assert engine.end(gang.executor.result()) == []
    assert_equal(gang.run([second]), served_by_one(folder(cut)).run([second]))
