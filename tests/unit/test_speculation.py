"""Drafts in the engine: what is verified, accepted, cached and counted."""

from array import array

import pytest
from engine_harness import Harness, expected_output
from pydantic import ValidationError

from warmroot.actors.engine.acceptance import TreeAcceptance
from warmroot.actors.engine.draft_length import Place, StepSeconds, StepShape, draft_lengths
from warmroot.actors.engine.draft_tree import Draft
from warmroot.actors.engine.ngram import MAX_INDEXED, NgramIndex
from warmroot.cluster.messages import FinishReason
from warmroot.cluster.speculative_config import SpeculativeConfig

PROMPT = [1, 2, 0, 1, 2, 2, 0, 1, 1, 0]
OUTPUT = expected_output(PROMPT, 40, 3)


def harness(method: str = "layer_skip", count: int = 3, *, adaptive: bool = False, **options) -> Harness:
    model = "heads" if method == "medusa" else None
    config = SpeculativeConfig(method=method, model=model, num_speculative_tokens=count, adaptive=adaptive)
    return Harness(speculation=config, **options)


@pytest.mark.parametrize("method", ["layer_skip", "ngram", "medusa"])
def test_drafts_save_steps_and_change_nothing(method):
    plain, h = Harness(), harness(method)
    for engine in (plain, h):
        engine.add("a", PROMPT, max_tokens=40)
        engine.run()
    assert h.output("a") == OUTPUT == plain.output("a")
    counts = h.engine.speculator.counts
    assert 0 < counts.accepted_tokens < counts.draft_tokens <= 3 * counts.drafts
    assert counts.accepted_by_place == sorted(counts.accepted_by_place, reverse=True)
    assert sum(counts.accepted_by_place) == counts.accepted_tokens
    # Every step brings one token, and every accepted one saves a step.
    assert len(h.executor.plans) == len(plain.executor.plans) - counts.accepted_tokens


def test_nothing_is_computed_beyond_max_tokens():
    for max_tokens in range(1, 8):
        h = harness(count=9)
        h.add("a", PROMPT, max_tokens=max_tokens)
        h.run()
        assert h.output("a") == OUTPUT[:max_tokens] and h.finish("a") is FinishReason.LENGTH
        ends = [s.num_computed + s.num_tokens for plan in h.executor.plans for s in plan.sequences]
        assert max(ends) <= len(PROMPT) + max_tokens - 1


@pytest.mark.parametrize("method", ["layer_skip", "medusa"])
def test_a_stop_inside_the_accepted_run_ends_there(method):
    prompt = [3, 1, 4, 1, 5]
    output = expected_output(prompt, 30, 3)
    for stop in range(3):
        for min_tokens in (0, 5):
            h = harness(method, count=9)
            h.add("a", prompt, max_tokens=30, stop_token_ids=(stop,), min_tokens=min_tokens)
            h.run()
            end = next(n + 1 for n, token in enumerate(output) if token == stop and n + 1 >= min_tokens)
            assert h.output("a") == output[:end] and h.finish("a") is FinishReason.STOP
            assert h.engine.cache.pool.num_used == 0
            h.check()


@pytest.mark.parametrize("method", ["layer_skip", "medusa"])
def test_only_accepted_tokens_are_cached(method):
    h = harness(method, count=9)
    h.add("a", PROMPT, max_tokens=30)
    while h.engine.has_work:
        h.step()
        h.check()
    known = array("i", PROMPT + OUTPUT[:30])
    for _, tokens in h.known.values():
        assert tokens in known.tobytes()
    h.add("b", PROMPT + OUTPUT[:30] + [2], max_tokens=1)
    h.run()
    assert h.deltas["b"][0].cached_tokens >= 36


def test_a_request_can_do_without():
    h = harness()
    h.add("a", PROMPT, max_tokens=12, speculative=False)
    h.add("b", PROMPT[::-1], max_tokens=12)
    h.run()
    steps = [step for plan in h.executor.plans for step in plan.sequences]
    assert not any(step.draft or step.num_drafts for step in steps if step.request_id == "a")
    assert any(step.draft for step in steps if step.request_id == "b")
    assert h.output("a") == OUTPUT[:12]


def test_drafts_leave_budget_for_prefills():
    h = harness(count=9, max_num_seqs=4, max_num_batched_tokens=8)
    for name in "abc":
        h.add(name, [*PROMPT, ord(name) % 3], max_tokens=40)
    for _ in range(12):
        h.step()
    h.add("late", [2] * 20, max_tokens=2)
    for _ in range(30):
        h.step()
    assert h.finish("late") is FinishReason.LENGTH
    h.run()


def test_with_chains_only_sequences_without_drafts_run_on():
    h = harness(max_in_flight=2, chains=True)
    h.add("a", PROMPT, max_tokens=20)
    h.add("b", PROMPT[::-1], max_tokens=20, speculative=False)
    h.run()
    assert h.output("a") == OUTPUT[:20] and h.output("b") == expected_output(PROMPT[::-1], 20, 3)
    assert h.engine.speculator.counts.accepted_tokens > 0


def test_ngrams_continue_what_stood_there_before():
    tokens = array("i", [7, 1, 2, 3, 4, 9, 1, 2])
    index = NgramIndex(2, 4)
    assert index.continuation(tokens, 3) == [3, 4, 9]
    tokens.extend([5, 6, 1, 2])
    assert index.continuation(tokens, 2) == [5, 6], "the last occurrence counts"
    tokens.append(8)
    assert index.continuation(tokens, 2) == []
    # The longer run wins over the later one.
    assert NgramIndex(1, 2).continuation(array("i", [1, 2, 3, 9, 2, 4, 1, 2]), 1) == [3]
    # What repeats is continued beyond the end.
    assert NgramIndex(1, 3).continuation(array("i", [5, 6, 7, 6, 7]), 5) == [6, 7, 6, 7, 6]
    assert NgramIndex(2, 4).continuation(array("i", [1]), 3) == []


def test_a_long_prompt_is_indexed_over_several_calls():
    length = 2 * MAX_INDEXED + 100
    tokens = array("i", [*range(length), length - 10, length - 9])
    index = NgramIndex(2, 3)
    assert [index.continuation(tokens, 2) for _ in range(3)] == [[], [], [length - 8, length - 7]]


def chains(*acceptances: float, most: int) -> list[list[Place]]:
    return [[Place(acceptance**place) for place in range(1, most + 1)] for acceptance in acceptances]


def test_lengths_follow_what_rows_cost():
    free, dear, mixed = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.25, 0.0)
    assert draft_lengths(chains(0.9, 0.1, most=4), 2, free, most_passes=0).lengths == [4, 4]
    assert draft_lengths(chains(0.9, 0.1, most=4), 2, dear, most_passes=0).lengths == [0, 0]
    # One stream makes 0.8 tokens/s: a second row takes 0.25 s, in which that is 0.2 of a token; with longer drafts 0.3.
    assert draft_lengths(chains(0.6, most=8), 1, mixed, most_passes=0).lengths == [2]
    likely, unlikely = draft_lengths(chains(0.9, 0.1, most=8), 2, mixed, most_passes=0).lengths
    assert likely > 2 and unlikely == 0
    # A pass of the drafting layers that costs as much as the step brings nothing.
    assert draft_lengths(chains(0.9, most=4), 1, (1.0, 0.0, 1.0), most_passes=4).lengths == [0]
    assert draft_lengths(chains(0.9, most=4), 1, (1.0, 0.0, 0.01), most_passes=4).lengths == [4]


def test_a_tree_takes_one_pass_and_as_many_nodes_as_pay():
    nodes = [Place(tokens) for tokens in (0.6, 0.3, 0.2, 0.1, 0.05)]
    assert draft_lengths([nodes], 1, (1.0, 0.0, 0.3), most_passes=1) == ([5], 0.0)
    assert draft_lengths([nodes], 1, (1.0, 0.0, 2.0), most_passes=1).lengths == [0]
    # With three nodes a step makes 2.1 tokens in 1.4 s, so a row of 0.1 s is worth 0.15 of a token.
    assert draft_lengths([nodes], 1, (1.0, 0.1, 0.0), most_passes=1) == ([3], pytest.approx(0.15, rel=0.01))


def test_nodes_that_are_seldom_there_cost_as_little():
    seldom = [Place(0.06, 0.1)] * 2
    assert draft_lengths([seldom], 1, (1.0, 0.2, 0.0), most_passes=1).lengths == [2]
    # Nor do they bring what a pass takes.
    assert draft_lengths([seldom], 1, (1.0, 0.2, 0.2), most_passes=1).lengths == [0]


def test_what_the_nodes_of_trees_bring_is_learnt():
    """By their places: of two nodes in each tree the first is right half the time, the second a quarter of it."""
    learnt = TreeAcceptance(4)
    h = harness("medusa")
    h.add("a", PROMPT)
    (request,) = h.engine._requests.values()
    places = learnt.places(request, 4)
    assert places == sorted(places, reverse=True)
    for step in range(2000):
        nodes = {0: [0], 2: [0], 1: [1], 3: []}[step % 4]
        learnt.learn(request, Draft((1, 2), (-1, -1)), nodes)
    first, second, *unknown = learnt.places(request, 4)
    assert (first.tokens, second.tokens) == pytest.approx((0.5, 0.25), abs=0.07)
    assert max(unknown) <= second
    for step in range(2000):
        learnt.drafted(request, 3, Draft((1, 2)[: 1 + step % 2], (-1, -1)[: 1 + step % 2]))
    assert [place.rows for place in learnt.places(request, 4)] == pytest.approx([1.0, 0.5, 0.0, 1.0], abs=0.02)
    assert learnt.places(request, 2)[1].tokens == pytest.approx(second.tokens / 2, rel=0.05)
    for _ in range(100):
        learnt.learn(request, Draft((1, 2), (-1, -1)), [])
    assert learnt.places(request, 4)[0].tokens < 0.1, "this request's are never right"


def test_step_seconds_are_learnt():
    seconds = StepSeconds()
    assert not seconds.is_known
    for step in range(200):
        shape = StepShape(rows=1 + step % 7 * 4, passes=step % 3)
        seconds.record(shape, 0.02 + 0.001 * shape.rows + 0.004 * shape.passes)
    assert seconds.costs(8) == pytest.approx((0.02, 0.001, 0.004), rel=0.05)


def run_timed(h: Harness, per_row: float) -> int:
    """Steps whose time is known; how many tokens were drafted in the second half."""
    for index in range(8):
        h.add(f"r{index}", [index % 3] * 9 + [index], max_tokens=200)
    half = 0
    for step in range(400):
        if not h.engine.has_work:
            break
        if step == 50:
            half = h.engine.speculator.counts.draft_tokens
        h.engine.begin()
        h.clock.now += 0.01 + per_row * h.executor.plans[-1].num_tokens
        h.record(h.engine.end(h.executor.result()))
    return h.engine.speculator.counts.draft_tokens - half


def test_adaptive_drafting_stops_where_rows_cost_in_full():
    cheap, dear = (
        run_timed(harness("ngram", 4, adaptive=True, num_blocks=600, max_num_batched_tokens=64), per_row)
        for per_row in (0.0, 0.1)
    )
    assert cheap > 100 > 5 * dear


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "draft_model"}, "draft_model needs a model"),
        ({"method": "ngram", "model": "x"}, "model is for draft_model and medusa, not for ngram"),
        ({"method": "medusa"}, "medusa needs a model"),
        ({"method": "ngram", "tree": [2]}, "tree is for medusa, not for ngram"),
        ({"method": "medusa", "model": "x", "tree": [2, 0]}, "greater than or equal to 1"),
        ({"method": "ngram", "num_layers": 2}, "num_layers is for layer_skip, not for ngram"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min must not exceed prompt_lookup_max"),
        ({"method": "eagle"}, "Input should be 'ngram', 'draft_model', 'layer_skip' or 'medusa'"),
        ({"method": "ngram", "gamma": 2}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_make_no_sense(keys, message):
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig(**keys)


def seconds_for(speculation: SpeculativeConfig | None, streams: int, cost: tuple[float, float, float]) -> float:
    """Time of a run on a machine whose steps take (base, per row, per pass) seconds."""
    h = Harness(num_blocks=2000, max_num_seqs=32, max_num_batched_tokens=512, speculation=speculation)
    for index in range(streams):
        h.add(f"r{index}", [index % 3, index // 3 % 3, index // 9 % 3, index // 27], max_tokens=220)
    base, per_row, per_pass = cost
    while h.engine.has_work:
        h.engine.begin()
        plan = h.executor.plans[-1]
        passes = max(s.num_drafts for s in plan.sequences)
        if speculation is not None and speculation.method == "medusa":
            passes, per_pass = min(passes, 1), 0.01 * base
        h.clock.now += base + per_row * plan.num_tokens + per_pass * passes
        h.record(h.engine.end(h.executor.result()))
    return h.clock.now


GUESSING = SpeculativeConfig(method="layer_skip", num_speculative_tokens=4)
"""Three guesses in four are right."""
LOOKING_UP = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
"""One in three is right: the tokens are as good as random."""


TREES = SpeculativeConfig(method="medusa", model="heads", num_speculative_tokens=14)
"""At each node one of two guesses is right, two times in three the first."""


@pytest.mark.parametrize("speculation", [GUESSING, LOOKING_UP, TREES], ids=["guessing", "looking up", "trees"])
@pytest.mark.parametrize("streams", [1, 32])
@pytest.mark.parametrize(
    "cost",
    [(0.010, 0.0001, 0.001), (0.008, 0.0007, 0.002), (0.001, 0.004, 0.004), (0.02, 0.0, 0.03)],
    ids=["rows are cheap", "rows cost", "rows cost in full", "passes cost more"],
)
def test_adaptive_drafting_is_never_slower(speculation, streams, cost):
    ratio = seconds_for(speculation, streams, cost) / seconds_for(None, streams, cost)
    assert ratio < 1.03
    if speculation is GUESSING:
        # Sequences do not end together, and the last ones are few.
        assert ratio < 1.16 * best_ratio(0.75, streams, cost)


@pytest.mark.parametrize("factor", [5, 100])
def test_a_slow_moment_does_not_forbid_drafts_for_long(factor):
    h = Harness(num_blocks=2000, max_model_len=4096, speculation=GUESSING)
    h.add("r", [1, 2, 0], max_tokens=2500)
    steps = drafted = 0
    while h.engine.has_work:
        h.engine.begin()
        plan = h.executor.plans[-1]
        passes = max(s.num_drafts for s in plan.sequences)
        steps += 1
        is_slow = steps < 30 and (passes or plan.num_tokens > 1)
        h.clock.now += (0.010 + 0.0005 * plan.num_tokens + 0.001 * passes) * (factor if is_slow else 1)
        drafted += steps > 300 and passes > 0
        h.record(h.engine.end(h.executor.result()))
    assert steps > 600
    assert drafted > 0.8 * (steps - 300)


def test_attempts_that_have_much_to_catch_up_with_are_rare():
    """A drafting model reads a prompt before its first guess, which takes as long as seven steps here."""
    h = Harness(num_blocks=2000, max_model_len=4096, speculation=GUESSING)
    lost = 0.0
    for index in range(3):
        h.add(f"r{index}", [index, 1, 2], max_tokens=2000)
    while h.engine.has_work:
        h.engine.begin()
        plan = h.executor.plans[-1]
        passes = max(s.num_drafts for s in plan.sequences)
        lost += 0.7 * passes
        h.clock.now += 0.100 + 0.7 * passes
        h.record(h.engine.end(h.executor.result()))
    assert lost < 0.02 * h.clock.now


def best_ratio(acceptance: float, streams: int, cost: tuple[float, float, float]) -> float:
    """Time per token with the best fixed length, relative to that without drafts."""
    base, per_row, per_pass = cost
    per_token = [
        (base + per_row * streams * (1 + length) + per_pass * length) / sum(acceptance**i for i in range(length + 1))
        for length in range(5)
    ]
    return min(per_token) / per_token[0]
