"""Two phases over all replicas of a model: all change, or none does, or it is said who holds what."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from warmroot.cluster.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelLoadError,
    ReplicaLostError,
    ReplicaUnavailableError,
    WeightsUpdateError,
)
from warmroot.cluster.weights_update import NewWeights
from warmroot.router.weights_updater import WeightsUpdater

NEW = NewWeights(version="2", model="/models/new")


class Replica:
    """Answers as told; ``asked`` is what it was asked, in order, over all replicas."""

    def __init__(self, name: str, asked: list[tuple[str, str]], **answers: Any) -> None:
        self.info = SimpleNamespace(replica=name, weights_version="1")
        self.client = self
        self.connected, self.draining = True, False
        self.answers = {"prepare_weights": {"weights_version": "2"}, "adopt_weights": {"seconds": 0.5}} | answers
        self._asked = asked

    async def ask(self, what: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._asked.append((self.info.replica, what))
        await asyncio.sleep(0)
        answer = self.answers.get(what, {})
        if isinstance(answer, Exception):
            raise answer
        if what == "adopt_weights":
            self.info.weights_version = arguments["version"]
        return answer


def make(**answers: dict[str, Any]) -> tuple[WeightsUpdater, dict[str, Replica], list[tuple[str, str]]]:
    asked: list[tuple[str, str]] = []
    replicas = {name: Replica(name, asked, **answers.get(name, {})) for name in ("a", "b")}
    return WeightsUpdater(lambda: list(replicas.values()), away_s=0.0), replicas, asked  # type: ignore[arg-type]


async def test_all_load_before_any_changes():
    updater, _, asked = make()
    report = await updater.update(NEW)
    assert [what for _, what in asked] == ["prepare_weights"] * 2 + ["adopt_weights"] * 2
    assert (report.weights_version, [one.replica for one in report.replicas]) == ("2", ["a", "b"])
    assert updater.stage == ""


async def test_one_by_one_the_next_changes_when_the_last_one_has():
    updater, replicas, asked = make()
    changing = asyncio.Event()

    async def slow(what: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        asked.append(("a", what))
        if what == "adopt_weights":
            await changing.wait()
        return replicas["b"].answers.get(what, {})

    replicas["a"].ask = slow  # type: ignore[method-assign]
    task = asyncio.ensure_future(updater.update(NEW, one_by_one=True))
    await asyncio.sleep(0.01)
    assert ("a", "adopt_weights") in asked and ("b", "adopt_weights") not in asked
    with pytest.raises(InvalidRequestError, match="another update"):
        await updater.update(NEW)
    changing.set()
    assert len((await task).replicas) == 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModelLoadError("tensor x is missing"), InvalidRequestError),
        (ReplicaUnavailableError("no room"), ReplicaUnavailableError),
    ],
)
async def test_what_fails_to_load_on_one_changes_none(error: Exception, kind: type[Exception]):
    updater, _, asked = make(b={"prepare_weights": error})
    with pytest.raises(kind, match="no replica has changed its weights: b: "):
        await updater.update(NEW)
    assert ("a", "adopt_weights") not in asked and ("a", "discard_weights") in asked


async def test_replicas_that_find_different_files_do_not_change():
    updater, _, asked = make(b={"prepare_weights": {"weights_version": "3"}})
    with pytest.raises(InvalidRequestError, match=r"different weights there \(2, 3\)"):
        await updater.update(NewWeights(model="/models/new"))
    assert ("b", "discard_weights") in asked


async def test_who_could_not_change_in_time_is_named():
    late = DeadlineExceededError("running requests have not ended within 1 s")
    updater, _, asked = make(b={"adopt_weights": late})
    with pytest.raises(WeightsUpdateError) as caught:
        await updater.update(NEW)
    assert "b: running requests have not ended within 1 s" in caught.value.message
    assert "a holds 2" in caught.value.message and "b holds 1" in caught.value.message
    assert ("b", "discard_weights") in asked


async def test_a_replica_that_is_lost_is_no_failure():
    updater, _, _ = make(b={"adopt_weights": ReplicaLostError("gone")})
    report = await updater.update(NEW)
    assert ([one.replica for one in report.replicas], report.lost) == (["a"], ("b",))


async def test_one_that_was_lost_and_is_back_is_asked_again():
    updater, replicas, asked = make(b={"adopt_weights": ReplicaLostError("gone")})
    updater._away_s = 60.0
    task = asyncio.ensure_future(updater.update(NEW))
    while asked.count(("b", "adopt_weights")) < 2:
        await asyncio.sleep(0)
    replicas["b"].answers["adopt_weights"] = {"seconds": 0.5}
    report = await task
    assert ([one.replica for one in report.replicas], report.lost) == (["a", "b"], ())
    assert asked[-2:] == [("b", "prepare_weights"), ("b", "adopt_weights")]


@pytest.mark.parametrize("ready", [True, False])
async def test_one_that_came_while_the_others_loaded_changes_too(ready: bool):
    updater, replicas, asked = make()
    updater._away_s = 60.0
    newcomer = Replica("c", asked)
    if not ready:  # it looks itself which weights the others have, before it is
        newcomer.answers["prepare_weights"] = ReplicaUnavailableError("c is not ready for prepare_weights")
    task = asyncio.ensure_future(updater.update(NEW))
    while ("a", "prepare_weights") not in asked:
        await asyncio.sleep(0)
    replicas["c"] = newcomer
    while ("c", "prepare_weights") not in asked:
        await asyncio.sleep(0)
    if not ready:
        newcomer.info.weights_version = "2"
    report = await task
    assert [one.replica for one in report.replicas] == (["a", "b", "c"] if ready else ["a", "b"])
    assert newcomer.info.weights_version == "2"


async def test_one_that_came_and_cannot_be_reached_is_named():
    updater, replicas, asked = make()
    task = asyncio.ensure_future(updater.update(NEW))
    while ("a", "prepare_weights") not in asked:
        await asyncio.sleep(0)
    replicas["c"] = Replica("c", asked)
    replicas["c"].connected = False
    with pytest.raises(WeightsUpdateError, match="c: cannot be reached; a holds 2; b holds 2; c holds 1"):
        await task


async def test_it_goes_on_when_nobody_waits_for_it_any_more():
    updater, replicas, asked = make()
    task = asyncio.ensure_future(updater.update(NEW))
    while not asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(InvalidRequestError, match="another update"):
        await updater.update(NEW)
    while updater.stage:
        await asyncio.sleep(0)
    assert [replica.info.weights_version for replica in replicas.values()] == ["2", "2"]


async def test_nothing_begins_while_a_replica_is_out_of_reach_or_there_is_none():
    updater, replicas, asked = make()
    replicas["b"].connected = False
    with pytest.raises(ReplicaUnavailableError, match="b cannot be reached: no weights have changed"):
        await updater.update(NEW)
    replicas.clear()
    with pytest.raises(ReplicaUnavailableError, match="has no replica"):
        await updater.update(NEW)
    assert asked == []


async def test_one_that_leaves_is_left_alone():
    updater, replicas, asked = make()
    replicas["b"].draining = True
    await updater.update(NEW)
    assert {name for name, _ in asked} == {"a"}
    replicas["a"].draining = True
    with pytest.raises(ReplicaUnavailableError, match="has no replica"):
        await updater.update(NEW)


def test_weights_come_from_one_place():
    for fields in ({}, {"model": "a", "actor": "b"}):
        with pytest.raises(InvalidRequestError, match="name one of them"):
            NewWeights(**fields)
