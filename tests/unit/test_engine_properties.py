"""Whatever happens to requests, outputs do not change and no page is lost."""

from engine_harness import Harness, expected_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from warmroot.cluster.errors import ContextTooLongError
from warmroot.cluster.messages import FinishReason
from warmroot.cluster.speculative_config import SpeculativeConfig

NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=3)
SPECULATION = [
    None,
    None,
    NGRAM,
    NGRAM.model_copy(update={"adaptive": False, "num_speculative_tokens": 9}),
    SpeculativeConfig(method="layer_skip"),
    SpeculativeConfig(method="layer_skip", num_speculative_tokens=7, adaptive=False),
    SpeculativeConfig(method="medusa", model="heads", num_speculative_tokens=10),
    SpeculativeConfig(method="medusa", model="heads", num_speculative_tokens=14, adaptive=False),
]
LAYOUTS = [(None,), (None, None), (6, None), (6, 6, None), (4, 9), (5,)]


class EngineMachine(RuleBasedStateMachine):
    """Random requests, aborts (also in the middle of a step) and clears, on pools far too small."""

    @initialize(
        windows=st.sampled_from(LAYOUTS),
        num_blocks=st.integers(8, 40),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(0, 24),
        chunk=st.sampled_from([None, 1, 5]),
        overtakes=st.integers(0, 3),
        caching=st.sampled_from([True, True, True, False]),
        in_flight=st.integers(1, 3),
        chains=st.booleans(),
        speculation=st.sampled_from(SPECULATION),
    )
    def start(
        self, windows, num_blocks, max_num_seqs, budget, chunk, overtakes, caching, in_flight, chains, speculation
    ):
        self.harness = Harness(
            num_blocks=num_blocks,
            windows=windows,
            max_in_flight=in_flight,
            chains=chains,
            max_model_len=60,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            max_prefill_chunk=chunk,
            max_overtakes=overtakes,
            enable_prefix_caching=caching,
            speculation=speculation,
        )
        self.requests = {}
        self.aborted = set()

    @rule(
        parts=st.lists(st.sampled_from([[0] * 4, [1, 2, 0, 1], [2] * 7, [1] * 3, [0, 1]]), min_size=1, max_size=6),
        max_tokens=st.integers(0, 20),
        priority=st.integers(-1, 1),
        copies=st.integers(1, 3),
        salt=st.sampled_from(["", "", "tenant"]),
        done=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, None, None, 0]),
        stops=st.sampled_from([(), (), (0,), (1, 2)]),
        min_tokens=st.integers(0, 3),
        speculative=st.sampled_from([True, True, False]),
    )
    def add(self, parts, max_tokens, priority, copies, salt, done, prompt_logprobs, stops, min_tokens, speculative):
        prompt = [token for part in parts for token in part]
        output = [] if stops else expected_output(prompt, min(done, max(0, max_tokens - 1)), 3)
        for _ in range(copies):
            request_id = f"r{len(self.requests)}"
            try:
                self.requests[request_id] = self.harness.add(
                    request_id,
                    prompt,
                    output=output,
                    priority=priority,
                    salt=salt,
                    max_tokens=max_tokens,
                    stop_token_ids=stops,
                    min_tokens=min(min_tokens, max_tokens),
                    prompt_logprobs=prompt_logprobs,
                    speculative=speculative,
                )
            except ContextTooLongError:
                assert len(prompt) + len(output) + 1 > self.harness.engine.max_tokens

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.harness.engine.abort(request_id)
        self.aborted.add(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort_in_flight(self, data):
        engine = self.harness.engine
        if not engine.begin():
            return
        for request_id in data.draw(st.lists(st.sampled_from(sorted(self.requests)), max_size=3)):
            engine.abort(request_id)
            self.aborted.add(request_id)
        self.harness.check()
        self.harness.record(engine.end(self.harness.executor.result()))

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.harness.step()
            self.harness.check()

    @rule()
    def two_in_flight(self):
        engine, executor = self.harness.engine, self.harness.executor
        plans = [engine.begin(), engine.begin()]
        for _ in range(sum(plans)):
            self.harness.record(engine.end(executor.result()))

    @rule()
    def drain(self):
        """Nothing new is submitted before all has landed."""
        while self.harness.engine.num_in_flight:
            self.harness.record(self.harness.engine.end(self.harness.executor.result()))
            self.harness.check()

    @rule(chance=st.integers(0, 5))
    def clear(self, chance):
        if chance == 5:
            self.harness.clear()

    @invariant()
    def consistent(self):
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        self.harness.run(2000)
        self.harness.check()
        for request_id, request in self.requests.items():
            self._check_output(request_id, request)
        self.nothing_is_held()
        self.harness.check()

    def nothing_is_held(self):
        engine = self.harness.engine
        assert engine.cache.pool.num_used == 0 and engine.load().waiting_tokens == 0
        engine.clear_cache()
        assert engine.cache.pool.num_free == self.harness.executor.num_blocks - 1

    def _check_output(self, request_id, request):
        room = self.harness.engine.max_tokens - len(request.prompt_token_ids)
        output = expected_output(request.prompt_token_ids, max(0, min(request.params.max_tokens, room)), 3)
        output = output[len(request.output_token_ids) :]
        stops = request.params.stop_token_ids
        ends = [n + 1 for n, token in enumerate(output) if token in stops and n + 1 >= request.params.min_tokens]
        output = output[: ends[0]] if ends else output
        if request_id in self.aborted:
            if request_id in self.harness.deltas:
                assert self.harness.output(request_id) == output[: len(self.harness.output(request_id))]
            return
        assert self.harness.finish(request_id) is (FinishReason.STOP if ends else FinishReason.LENGTH)
        assert self.harness.output(request_id) == output


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
