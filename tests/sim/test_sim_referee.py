"""Our simulator beside the one that ai-dynamo-runtime ships, where that is installed."""

import pytest

from warmroot.deploy.bench import routing_referee
from warmroot.deploy.bench.report import Report
from warmroot.deploy.bench.routing_referee import FIGURES, Verdict, judge, replay, tell
from warmroot.deploy.simulate.costs import ReplicaCosts
from warmroot.deploy.simulate.scenario import load_trace, scaled


@pytest.fixture(scope="module")
def traffic():
    return scaled(load_trace("chat", 300, 3), 8, 0.5, ReplicaCosts())


@pytest.mark.skipif(not routing_referee.is_installed(), reason="ai-dynamo-runtime is not installed")
def test_the_referee_agrees(traffic):
    for verdict in judge(traffic, "chat", 8, 0.5, 0):
        assert abs(verdict.off("hit_rate")) < 0.03, verdict
        assert abs(verdict.off("ttft_mean_s")) < 0.05, verdict
        assert abs(verdict.off("e2e_mean_s")) < 0.05, verdict


def test_without_the_referee_the_command_says_what_to_install(traffic, monkeypatch):
    monkeypatch.setattr(routing_referee, "find_spec", lambda name: None)
    with pytest.raises(routing_referee.ConfigError, match="pip install ai-dynamo-runtime"):
        replay(traffic, 8, None)


def test_distances_become_bars(capsys):
    theirs = dict.fromkeys(FIGURES, 2.0)
    near = Verdict("a", 4, 0.5, "dynamo", theirs, {**theirs, "ttft_mean_s": 2.04})
    far = Verdict("b", 4, 0.5, "dynamo", theirs, {**theirs, "ttft_mean_s": 1.8})
    saturated = Verdict("b", 4, 0.8, "dynamo", theirs, {**theirs, "ttft_mean_s": 1.0})
    with Report("routing", {}, json_only=True) as report:
        tell(report, [near, far, saturated])
        assert report.finish() == 1
    out = capsys.readouterr().out
    assert '"ttft_mean_s: median distance":{"value":0.06,' in out
    assert '"ttft_mean_s: worst, b N=4 0.5 dynamo":{"value":0.1,' in out
    assert '"hit_rate: median distance":{"value":0.0,' in out
