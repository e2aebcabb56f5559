"""What serve says of its replicas once they are up."""

from types import SimpleNamespace

from warmroot.deploy import launch


class _Handle:
    """Hears of a replica more each time it is asked."""

    def __init__(self, *infos):
        self._infos = infos
        self._asked = 0

    def replicas(self):
        self._asked += 1
        return [SimpleNamespace(info=info) for info in self._infos[: self._asked]]


def test_the_announcement_waits_for_what_the_bus_tells_of_every_replica():
    handle = _Handle("a", "b", "c")
    assert [replica.info for replica in launch._known_replicas(handle, 3)] == ["a", "b", "c"]


def test_a_silent_bus_does_not_hold_it_up(monkeypatch):
    monkeypatch.setattr(launch, "_HEARSAY_S", 0.05)
    assert launch._known_replicas(_Handle(), 2) == []
