"""A rank in a process of its own is asked over a connection, and answers whatever becomes of it."""

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from warmroot.actors.parallel import spawn
from warmroot.cluster.errors import EngineError, ModelLoadError
from warmroot.cluster.weights_update import NewWeights


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ModelLoadError("tensor x is missing"), ModelLoadError, "tensor x is missing"),
        (OSError("disk full"), EngineError, r"rank 1: OSError\('disk full'\)"),
        (ValueError("no"), EngineError, r"rank 1: ValueError\('no'\)"),
    ],
)
def test_what_a_rank_trips_over_is_its_answer_and_it_lives_on(monkeypatch, tmp_path, raised, kind, message):
    left: list[int] = []
    monkeypatch.setattr(spawn.os, "_exit", left.append)

    def prepare(version: str, source: object) -> str:
        raise raised

    member = SimpleNamespace(prepare=prepare, times=lambda: "times")
    ours, theirs = Pipe()
    thread = threading.Thread(target=spawn._serve, args=(theirs, member, "1"))
    thread.start()
    ours.send(NewWeights(version="2", model=str(tmp_path)))
    answer, error = ours.recv()
    assert answer is None
    with pytest.raises(kind, match=message):
        raise error
    ours.send("times")
    assert ours.recv() == ("times", None)
    assert not left
    ours.close()
    thread.join(10)
    assert left == [1]
