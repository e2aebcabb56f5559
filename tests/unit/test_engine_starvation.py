"""Prefills and decodes in one engine: neither waits for the other, however many come (SGLang #32549, vLLM #56847)."""

from collections import Counter

import pytest
from engine_harness import Harness

DECODERS = ("d0", "d1", "d2")


@pytest.mark.parametrize("options", [{}, {"max_in_flight": 2, "chains": True}, {"max_prefill_chunk": 4}], ids=str)
def test_every_step_decodes_for_everyone_while_long_prompts_keep_coming(options):
    harness = Harness(num_blocks=1000, max_num_batched_tokens=16, max_num_seqs=8, **options)
    for number, name in enumerate(DECODERS):
        harness.add(name, [number] * 4, max_tokens=100)
    while any(name not in harness.deltas for name in DECODERS):
        harness.step()
    first = len(harness.executor.plans) + 1  # the next may have been made before
    for number in range(60):
        harness.add(f"p{number}", [number % 3, 1, 2, number // 3 % 3] * 25, max_tokens=1, salt=str(number))
        harness.step()
    plans = harness.executor.plans[first : first + 50]
    for plan in plans:
        share = Counter({sequence.request_id: sequence.num_tokens for sequence in plan.sequences})
        assert [share[name] for name in DECODERS] == [1, 1, 1]
        assert plan.num_tokens <= 16
    prefilled = sum(plan.num_tokens for plan in plans) - len(DECODERS) * len(plans)
    chunk = options.get("max_prefill_chunk", 13)
    assert prefilled >= 0.9 * chunk * len(plans), "and prompts get what is left"


def test_a_prompt_is_not_overtaken_for_ever_by_those_that_decode():
    """A step has room for as many decodes as there are sequences, and for a part of a prompt beside them."""
    harness = Harness(num_blocks=1000, max_num_batched_tokens=9, max_num_seqs=8)
    for number in range(7):
        harness.add(f"d{number}", [number % 3] * 4, max_tokens=200, salt=str(number))
    for _ in range(30):
        harness.step()
    harness.add("p", [0, 1, 2, 1] * 5, max_tokens=1)
    for _ in range(10):  # two tokens a step
        harness.step()
    assert harness.finish("p") is not None
