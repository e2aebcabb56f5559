"""Plans for a pipeline: every stage has work as long as there are requests."""

from engine_harness import Harness, expected_output

PROMPTS = [[index, 1, 2] for index in range(1, 6)]


def test_decodes_are_dealt_out_to_the_plans_in_flight():
    h = Harness(vocab_size=50, max_in_flight=2, chains=False)
    for index, prompt in enumerate(PROMPTS):
        h.add(str(index), prompt, max_tokens=8)
    sizes: list[list[int]] = []
    while h.engine.has_work:
        h.engine.begin_all()
        in_flight = h.executor.plans[len(h.executor.plans) - h.engine.num_in_flight :]
        sizes.append(sorted(len(plan.sequences) for plan in in_flight))
        h.record(h.engine.end(h.executor.result()))
        h.check()
    assert sizes[0] == [5]  # the prompts fit one step
    assert sizes[1:-1] == [[2, 3]] * (len(sizes) - 2)
    for index, prompt in enumerate(PROMPTS):
        assert h.output(str(index)) == expected_output(prompt, 8, 50)


def test_a_lone_request_has_no_company():
    h = Harness(vocab_size=50, max_in_flight=4, chains=False)
    h.add("a", PROMPTS[0], max_tokens=4)
    while h.engine.has_work:
        h.engine.begin_all()
        assert h.engine.num_in_flight == 1
        h.record(h.engine.end(h.executor.result()))
    assert h.output("a") == expected_output(PROMPTS[0], 4, 50)
