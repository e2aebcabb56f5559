"""The measurement of a router's start works; what it measures is for ``bench_join.py`` itself to tell."""

from redis_server import RedisServer, needs_redis

from .bench_join import Fleet, join


@needs_redis
async def test_a_late_router_learns_the_warmest_first_and_all_in_the_end(tmp_path):
    server = RedisServer(tmp_path).start()
    try:
        result = await join(server, Fleet(20_000, 8))
    finally:
        server.kill()
    assert result["final_hit_rate"] == 1.0
    assert result["blocks"] == 16 * 8 * 156
    assert 0 < result["useful_s"] <= result["complete_s"]
    assert 20 < result["redis_bytes_per_block"] < 200
