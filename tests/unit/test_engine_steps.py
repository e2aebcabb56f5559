"""What the engine promises, one behaviour at a time (block size 4, vocabulary 3 unless said)."""

import pytest
from engine_harness import Harness, expected_output

from warmroot.actors.engine.config import EngineConfig
from warmroot.cluster.errors import (
    ConfigError,
    ContextTooLongError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from warmroot.cluster.ids import NULL_BLOCK
from warmroot.cluster.messages import FinishReason

PROMPT = [0, 1, 2, 0, 2, 1, 1, 0, 2, 2]
OUTPUT = expected_output(PROMPT, 12, 3)


def tokens_per_plan(harness):
    return [plan.num_tokens for plan in harness.executor.plans]


def computed(harness, request_id):
    return sum(s.num_tokens for plan in harness.executor.plans for s in plan.sequences if s.request_id == request_id)


def test_a_request_from_prompt_to_length():
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=5)
    harness.run()
    assert harness.output("a") == OUTPUT[:5] and harness.finish("a") is FinishReason.LENGTH
    assert tokens_per_plan(harness) == [10, 1, 1, 1, 1]
    first, *others = harness.deltas["a"]
    assert first.cached_tokens == 0 and first.index == 0 and all(delta.cached_tokens is None for delta in others)


def test_plans_are_diffs():
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=5)
    harness.run()
    harness.add("b", [1, 1], max_tokens=1)
    harness.run()
    plans = harness.executor.plans
    assert [len(plan.new) for plan in plans] == [1, 0, 0, 0, 0, 1]
    assert [len(plan.sequences[0].new_blocks[0]) for plan in plans[:5]] == [0, 0, 0, 1, 0]
    assert [plan.finished for plan in plans] == [(), (), (), (), (), ("a",)]
    assert [plan.sequences[0].samples for plan in plans] == [True] * 6


def test_eos_stops_unless_ignored():
    eos = OUTPUT[2]
    stop = OUTPUT.index(eos) + 1
    harness = Harness(eos_token_ids=(eos,))
    harness.add("a", PROMPT, max_tokens=12)
    harness.add("b", PROMPT, max_tokens=12, ignore_eos=True)
    harness.run()
    assert harness.output("a") == OUTPUT[:stop] and harness.finish("a") is FinishReason.STOP
    assert harness.deltas["a"][-1].stop_reason is None
    assert harness.output("b") == OUTPUT and harness.finish("b") is FinishReason.LENGTH


def test_a_stop_token_is_named_and_min_tokens_holds_it_off():
    token = OUTPUT[0]
    again = next(i for i in range(5, 12) if OUTPUT[i] == token)
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=12, stop_token_ids=(token,))
    harness.add("b", PROMPT, max_tokens=12, stop_token_ids=(token,), min_tokens=6)
    harness.run()
    assert harness.output("a") == [token] and harness.deltas["a"][-1].stop_reason == token
    assert harness.output("b") == OUTPUT[: again + 1] and harness.finish("b") is FinishReason.STOP


def test_no_tokens_wanted():
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=0, prompt_logprobs=0)
    harness.run()
    (delta,) = harness.deltas["a"]
    assert delta.token_ids == [] and delta.finish_reason is FinishReason.LENGTH
    assert [entry and entry.token_id for entry in delta.prompt_logprobs] == [None, *PROMPT[1:]]
    assert not harness.executor.plans[0].sequences[0].samples


def test_prompt_logprobs_come_whole_whatever_is_cached_or_chunked():
    harness = Harness(max_num_batched_tokens=8)
    harness.add("warm", PROMPT, max_tokens=1)
    harness.run()
    harness.add("a", PROMPT, max_tokens=2, prompt_logprobs=1)
    harness.run()
    first, second = harness.deltas["a"]
    assert [entry and entry.token_id for entry in first.prompt_logprobs] == [None, *PROMPT[1:]]
    assert first.cached_tokens == 0 and second.prompt_logprobs is None


def test_the_context_ends_a_request():
    harness = Harness(max_model_len=13)
    harness.add("a", PROMPT)
    harness.run()
    assert harness.output("a") == OUTPUT[:3] and harness.finish("a") is FinishReason.LENGTH


def test_the_pool_is_a_context_too():
    harness = Harness(num_blocks=4)
    assert harness.engine.max_tokens == 12
    harness.add("a", PROMPT)
    harness.run()
    assert harness.output("a") == OUTPUT[:2]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], InvalidRequestError),
        ([3], InvalidRequestError),
        ([-1], InvalidRequestError),
        ([1] * 13, ContextTooLongError),
    ],
)
def test_what_cannot_be_served_is_refused(prompt, error):
    harness = Harness(config=EngineConfig(max_model_len=13, vocab_size=3))
    with pytest.raises(error):
        harness.add("a", prompt)
    assert not harness.engine.has_work


def test_token_ids_beyond_int32_are_refused():
    with pytest.raises(InvalidRequestError, match="int32"):
        Harness().add("a", [2**40])


def test_an_id_is_used_once_at_a_time():
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=1)
    with pytest.raises(InvalidRequestError, match="running already"):
        harness.add("a", PROMPT)
    harness.run()
    harness.add("a", PROMPT, max_tokens=1)


def test_a_full_queue_says_when_to_come_back():
    harness = Harness(max_num_queued_reqs=2, max_num_seqs=1)
    for name in "ab":
        harness.add(name, PROMPT, max_tokens=2)
    with pytest.raises(OverloadedError) as refused:
        harness.add("c", PROMPT)
    assert refused.value.retry_after == 1.0  # nothing measured yet
    engine = harness.engine
    engine.begin()
    harness.clock.now += 10.0  # 10 tokens in 10 seconds
    harness.record(engine.end(harness.executor.result()))
    harness.add("c", PROMPT)
    with pytest.raises(OverloadedError) as refused:
        harness.add("d", PROMPT)
    assert refused.value.retry_after == pytest.approx(10.0)  # then b, which has 10 to compute, has left the queue


def test_a_resumed_request_goes_on_where_it_was():
    harness = Harness()
    harness.add("a", PROMPT, output=OUTPUT[:4], max_tokens=9)
    harness.run()
    assert harness.deltas["a"][0].index == 4 and harness.output("a") == OUTPUT[4:9]
    assert harness.executor.plans[0].new[0].num_prompt_tokens == len(PROMPT)


def test_a_request_resumed_at_its_end_just_ends():
    harness = Harness(eos_token_ids=(OUTPUT[3],))
    harness.add("a", PROMPT, output=OUTPUT[:4], max_tokens=4, ignore_eos=True)
    harness.add("b", PROMPT, output=OUTPUT[:4], max_tokens=9)
    assert harness.engine.has_work
    harness.run()
    assert (harness.finish("a"), harness.finish("b")) == (FinishReason.LENGTH, FinishReason.STOP)
    assert harness.deltas["a"][0].index == 4 and harness.executor.plans == []


def test_prefill_is_chunked_and_decodes_go_first():
    harness = Harness(max_num_batched_tokens=8, max_prefill_chunk=3)
    harness.add("a", [1], max_tokens=8)
    harness.step()
    harness.add("b", PROMPT, max_tokens=1)
    harness.run()
    assert tokens_per_plan(harness)[:6] == [1, 4, 4, 4, 2, 1]
    assert [s.request_id for s in harness.executor.plans[1].sequences] == ["a", "b"]
    # Alone, a prefill may have the whole budget.
    harness.add("c", [2] * 16, max_tokens=1)
    harness.run()
    assert tokens_per_plan(harness)[-2:] == [8, 8]


def test_a_warm_prefix_is_not_computed_again():
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=5)
    harness.run()
    # Three blocks are full, generated tokens among them: the next turn finds them.
    turn = [*PROMPT, *OUTPUT[:5], 1, 1]
    harness.add("b", turn, max_tokens=1)
    harness.run()
    assert harness.deltas["b"][0].cached_tokens == 12
    assert computed(harness, "b") == len(turn) - 12


def test_a_partly_shared_block_is_copied():
    harness = Harness()
    harness.add("a", [0] * 8, max_tokens=1)
    harness.run()
    harness.add("b", [0] * 7 + [1, 1], max_tokens=1)
    harness.run()
    ((source, destination),) = harness.executor.plans[-1].copies
    new = harness.executor.plans[-1].new[0]
    assert new.num_computed == 7 and new.block_tables[0][1] == destination != source
    assert harness.output("b") == expected_output([0] * 7 + [1, 1], 1, 3)


def test_a_prefix_being_computed_is_waited_for():
    harness = Harness(max_num_batched_tokens=16)
    for name in "abc":
        harness.add(name, [0, 1] * 20, max_tokens=3)
    harness.run()
    # 40 tokens and 2 decodes once; the others find 36 cached and copy 3 of the last block.
    assert [computed(harness, name) for name in "abc"] == [42, 3, 3]
    assert all(harness.output(name) == expected_output([0, 1] * 20, 3, 3) for name in "abc")


def test_who_waits_for_a_prefix_goes_on_when_its_computer_is_aborted():
    harness = Harness(max_num_batched_tokens=8)
    harness.add("a", [0, 1] * 20, max_tokens=3)
    harness.add("b", [0, 1] * 20, max_tokens=3)
    harness.step()
    assert [request.id for request in harness.engine.scheduler.waiting] == ["b"]
    harness.engine.abort("a")
    harness.run()
    assert harness.deltas["b"][0].cached_tokens == 8


def test_tenants_do_not_wait_for_each_other_nor_share():
    harness = Harness()
    harness.add("a", PROMPT, max_tokens=1, salt="one")
    harness.add("b", PROMPT, max_tokens=1, salt="two")
    harness.step()
    assert [delta.cached_tokens for name in "ab" for delta in harness.deltas[name]] == [0, 0]


def test_the_warmest_waiting_prefix_goes_first():
    harness = Harness(max_num_seqs=1)
    harness.add("warm", [0] * 12, max_tokens=1)
    harness.run()
    harness.add("cold", [1] * 12, max_tokens=1)
    harness.add("lukewarm", [*[0] * 4, *[1] * 8], max_tokens=1)
    harness.add("hot", [*[0] * 12, 1], max_tokens=1)
    harness.run()
    assert list(harness.deltas) == ["warm", "hot", "lukewarm", "cold"]


def test_nobody_is_overtaken_for_ever():
    harness = Harness(max_num_seqs=1, max_overtakes=3)
    harness.add("first", [0] * 12, max_tokens=1)
    harness.run()
    harness.add("cold", [1] * 12, max_tokens=1)
    for index in range(6):
        harness.add(f"hot{index}", [*[0] * 12, index % 3], max_tokens=1)
    harness.run()
    assert list(harness.deltas).index("cold") == 4


def test_priority_goes_before_warmth_and_age_before_priority():
    harness = Harness(max_num_seqs=1, priority_age_s=30.0)
    harness.add("warm", [0] * 8, max_tokens=1)
    harness.run()
    harness.add("old", [1] * 8, priority=1, max_tokens=1)
    harness.clock.now += 29
    harness.add("urgent", [2] * 8, priority=0, max_tokens=1)
    harness.add("casual", [*[0] * 8, 1], priority=1, max_tokens=1)
    harness.clock.now += 2
    harness.add("late", [2, 1] * 4, priority=0, max_tokens=1)
    harness.run()
    # Arrival plus 30 s per step of priority: urgent 30, old 31, late 32, casual 60.
    assert list(harness.deltas) == ["warm", "urgent", "old", "late", "casual"]


def test_preemption_takes_the_latest_and_changes_no_output():
    harness = Harness(num_blocks=10)
    names = ["a", "b", "c"]
    prompts = {name: [index] * 8 for index, name in enumerate(names)}
    for name in names:
        harness.add(name, prompts[name], max_tokens=16)
    preempted = set()
    while harness.engine.has_work:
        harness.step()
        harness.check()
        preempted |= {request.id for request in harness.engine.scheduler.waiting if request.num_preemptions}
    assert preempted and "a" not in preempted
    for name in names:
        assert harness.output(name) == expected_output(prompts[name], 16, 3)
    assert [delta.cached_tokens for name in names for delta in harness.deltas[name][1:]] == [None] * 45


def test_priority_decides_who_is_preempted():
    harness = Harness(num_blocks=7)
    harness.add("batch", [0] * 8, max_tokens=12, priority=1)
    harness.add("chat", [1] * 8, max_tokens=12, priority=0)
    harness.run()
    ids = [new.request_id for plan in harness.executor.plans for new in plan.new]
    assert ids.count("batch") > 1 and ids.count("chat") == 1


def test_windows_give_their_pages_back():
    harness = Harness(windows=(8, None), num_blocks=64, max_model_len=128)
    harness.add("a", PROMPT, max_tokens=80)
    while harness.engine.has_work:
        harness.step()
        harness.check()
        for request in harness.engine.scheduler.running:
            sliding, full = (sum(b != NULL_BLOCK for b in table) for table in request.lease.tables)
            assert sliding <= 4 and full == -(-request.num_computed // 4)
    assert harness.output("a") == expected_output(PROMPT, 80, 3)


def test_windows_let_a_sequence_outgrow_the_pool():
    harness = Harness(windows=(8,), num_blocks=6, max_model_len=200)
    harness.add("a", PROMPT, max_tokens=150)
    harness.run()
    assert harness.output("a") == expected_output(PROMPT, 150, 3)


def test_abort_is_idempotent_and_frees_at_once():
    harness = Harness(max_num_seqs=1)
    harness.add("a", PROMPT)
    harness.add("b", PROMPT)
    harness.step()
    for name in ("a", "b", "a", "unknown"):
        harness.engine.abort(name)
    assert not harness.engine.has_work and harness.engine.cache.pool.num_used == 0
    assert harness.engine.load().waiting == harness.engine.load().waiting_tokens == 0
    harness.add("c", PROMPT, max_tokens=1)
    harness.run()
    assert harness.executor.plans[-1].finished == ("a",)


def test_pages_of_a_step_in_flight_are_not_given_away():
    harness = Harness(num_blocks=4)
    engine = harness.engine
    harness.add("a", PROMPT, max_tokens=2)
    assert engine.begin()
    engine.abort("a")
    assert engine.cache.pool.num_used == 3 and engine.has_work
    harness.add("b", [2] * 10, max_tokens=1)
    assert not engine.begin()
    assert engine.end(harness.executor.result()) == []
    assert engine.cache.pool.num_used == 0
    harness.run()
    assert harness.output("b") == expected_output([2] * 10, 1, 3)


def test_decodes_are_in_one_plan_at_a_time():
    harness = Harness()
    engine = harness.engine
    harness.add("a", PROMPT, max_tokens=2)
    assert engine.begin()
    harness.add("b", [1] * 8, max_tokens=2)
    assert engine.begin() and not engine.begin() and engine.num_in_flight == 2
    for _ in range(2):
        harness.record(engine.end(harness.executor.result()))
    harness.run()
    assert harness.output("a") == OUTPUT[:2]


def test_a_failed_step_ends_everything_with_an_error():
    harness = Harness(fail_at=3, max_num_seqs=2)
    for name in "abc":
        harness.add(name, PROMPT, max_tokens=8)
    harness.run()
    for name in "abc":
        assert harness.finish(name) is FinishReason.LOST
        assert harness.deltas[name][-1].error == "scripted failure"
    assert not harness.engine.has_work and harness.engine.cache.pool.num_used == 0
    with pytest.raises(EngineError, match="scripted failure"):
        harness.add("d", PROMPT)


def test_an_executor_that_raises_is_a_failed_step():
    harness = Harness()
    harness.executor.submit = lambda plan: 1 / 0
    harness.add("a", PROMPT)
    (delta,) = harness.step()
    assert delta.finish_reason is FinishReason.LOST and "ZeroDivisionError" in delta.error
    with pytest.raises(EngineError):
        harness.step()


def test_tokens_that_are_cached_do_not_wait_to_be_computed():
    harness = Harness(max_num_seqs=1)
    harness.add("a", list(range(9)), max_tokens=1)
    harness.run()
    harness.add("other", [7] * 5, max_tokens=1)
    harness.add("b", list(range(9)), max_tokens=1)
    block_size = harness.executor.layout.block_size
    assert harness.engine.load().waiting_tokens == 5 + 9 - 9 // block_size * block_size
    harness.run()
    assert harness.engine.load().waiting_tokens == 0


def test_load_tells_what_the_router_needs():
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=4)
    harness.add("a", PROMPT, max_tokens=3)
    harness.add("b", [1] * 7, max_tokens=1)
    harness.step()
    load = harness.engine.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 1, 6 + 7)
    assert (load.kv_used_blocks, load.kv_total_blocks, load.max_num_seqs) == (1, 63, 1)
    harness.run()
    assert harness.engine.load().kv_usage == 0.0


def test_without_prefix_caching_outputs_are_the_same():
    harness = Harness(enable_prefix_caching=False)
    for name in "ab":
        harness.add(name, PROMPT, max_tokens=6)
    harness.run()
    assert harness.output("a") == harness.output("b") == OUTPUT[:6]
    assert harness.engine.cache.num_cached == 0 and harness.deltas["b"][0].cached_tokens == 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk"),
        ({"max_overtakes": -1}, "max_overtakes"),
    ],
)
def test_a_wrong_setting_is_named(options, param):
    with pytest.raises(ConfigError) as wrong:
        EngineConfig(max_model_len=8, **options)
    assert wrong.value.param == param
