"""Groups that need no second process."""

import pytest
import torch
from torch.distributed import HashStore

from warmroot.actors.parallel.groups import RankLists, make_groups
from warmroot.actors.parallel.rendezvous import join_store, serve_store
from warmroot.actors.parallel.solo import SoloGroup
from warmroot.actors.parallel.traffic import Traffic
from warmroot.cluster.errors import RankLostError
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")


def test_a_gang_of_one_has_nobody_to_wait_for():
    alone = RankLists.of(Topology(), 0)
    groups = make_groups(0, alone, HashStore(), address="127.0.0.1", device=CPU, library=None, deadline_s=1.0)
    x = torch.arange(6.0).reshape(2, 3)
    for group in (groups.tp, groups.pp, groups.ep, groups.control):
        assert isinstance(group, SoloGroup)
    groups.tp.all_reduce(x)
    groups.tp.broadcast(x, 0)
    groups.control.barrier()
    assert torch.equal(groups.tp.all_gather(x), x[None])
    assert torch.equal(groups.tp.gather(x, 0), x[None])
    assert groups.ep.exchange_counts([2]) == [2]
    out = torch.empty(2, 3)
    groups.ep.all_to_all(x, [2], out, [2]).wait()
    assert torch.equal(out, torch.arange(6.0).reshape(2, 3))
    for call in (groups.pp.send, groups.pp.recv):
        with pytest.raises(ValueError, match="a group of one"):
            call(x, 1)
    groups.close()
    assert not groups.traffic.num_bytes


@pytest.mark.parametrize(
    ("topology", "rank", "tp", "pp", "ep"),
    [
        (Topology(tp=2, pp=2), 3, [2, 3], [1, 3], [3]),
        (Topology(tp=2, ep=4), 1, [0, 1], [1], [0, 1, 2, 3]),
        (Topology(tp=4, ep=2), 2, [0, 1, 2, 3], [2], [0, 2]),
    ],
)
def test_lists_of_a_rank(topology, rank, tp, pp, ep):
    lists = RankLists.of(topology, rank)
    assert (lists.tp, lists.pp, lists.ep) == (tp, pp, ep)
    assert lists.control == list(range(topology.world_size))


def test_peers_that_do_not_come_are_lost():
    store = serve_store("127.0.0.1", 0.3)
    pair = RankLists(tp=[0, 1], pp=[0], ep=[0], control=[0, 1])
    with pytest.raises(RankLostError, match="joining a group of rank 0, rank 1"):
        make_groups(0, pair, store, address="127.0.0.1", device=CPU, library=None, deadline_s=0.3)


def test_a_store_that_is_not_there_is_lost():
    with pytest.raises(RankLostError, match=r"rank 0's store at 127\.0\.0\.1:1"):
        join_store("127.0.0.1", 1, 0.2)


def test_traffic_adds_up_until_it_is_cleared():
    traffic = Traffic()
    traffic.add("hop", 100)
    traffic.add("hop", 20)
    traffic.add("plan", 3)
    assert traffic.num_bytes == {"hop": 120, "plan": 3}
    assert traffic.num_calls == {"hop": 2, "plan": 1}
    traffic.clear()
    assert not traffic.num_bytes
    assert not traffic.num_calls
