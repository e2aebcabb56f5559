"""``warmroot bench router`` runs with ``--quick`` from end to end, and its load is what it says it is."""

import json

import pytest

from warmroot.deploy.bench import router
from warmroot.deploy.bench.router_load import BLOCK_SIZE, PROMPT_TOKENS, FleetLoad
from warmroot.deploy.bench.router_measure import fill
from warmroot.kv_store.index import PrefixIndex


def test_the_load_is_what_it_says() -> None:
    load, index = FleetLoad(12_000, 4, seed=1), PrefixIndex()
    applied = fill(index, load.batches())
    assert 11_000 < applied.num_blocks <= 12_000
    prompts = load.prompts(80)
    held = [max((n for _, n in index.held(load.root, tokens, BLOCK_SIZE)), default=0) for tokens in prompts]
    assert {len(tokens) for tokens in prompts} == {4 * PROMPT_TOKENS}
    assert [n > 4500 for n in held] == [False, True] * 40
    assert sum(n == 512 for n in held) == sum(n == 0 for n in held) == 20


def test_bench_router_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main(["--quick", "--json", "--no-rivals"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["bench"], result["router"]["replicas"], result["large_fleet"]["replicas"]) == ("router", 4, 16)
    for part in ("router", "large_fleet"):
        figures = result[part]
        for timed in (figures["lookup"], *figures["decision"].values()):
            assert 0 < timed["p50_us"] <= timed["p99_us"]
        assert figures["events"]["stored_blocks_per_s"] > 0
    for joined in result["join"].values():
        assert joined["num_blocks"] == result["router"]["events"]["num_blocks"]
        assert 0.4 < joined["hit_rate"] < 0.6
    assert len(result["bars"]) in (8, 10)
