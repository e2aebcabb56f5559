"""What is done to the site: each fault finds its victim by the schedule's draw, strikes, and heals if it is to."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..integration.hosts_harness import Host
from .bad_link import Cable
from .ballast import DISK, MEMORY, pretend_full_memory, start_ballast
from .links import LOSSY, SLOW, BadLink
from .site import Found, Site, send

MONITOR_S = 15.0
"""Ray looks at memory four times a second."""
Heal = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that has happened."""

    target: str
    heal: Heal | None = None
    """To be called after the fault's time; None: what runs there heals by itself."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault."""

    name: str
    strike: Callable[[Site, random.Random], Strike | None]
    """None when there is no victim now."""
    lasts_s: float = 0.0
    """Until it is healed."""
    may_cut: bool = False
    """Whether connections of clients may break by it: those that go through what it takes away."""


def kill(site: Site, draw: random.Random, *, role: str) -> Strike | None:
    """kill -9."""
    victim = pick(site.find(role), draw)
    if victim is None:
        return None
    send(victim, signal.SIGKILL)
    return Strike(victim.name)


def stop(site: Site, draw: random.Random, *, role: str, for_ever: bool) -> Strike | None:
    """SIGSTOP. It goes on when it is healed, or never."""
    victim = pick(site.find(role), draw)
    if victim is None:
        return None
    send(victim, signal.SIGSTOP)
    return Strike(victim.name, None if for_ever else partial(send, victim, signal.SIGCONT))


def kill_leader(site: Site, draw: random.Random) -> Strike | None:
    """kill -9 of the process that leads a gang."""
    state = site.state()
    gangs = [replica for replica in (state or {"replicas": []})["replicas"] if replica["ranks"]]
    leaders = {(replica["ranks"][0]["host"], replica["pid"]) for replica in gangs}
    victim = pick([one for one in site.find("replica") if (one.host.name, one.process.inner_pid) in leaders], draw)
    if victim is None:
        return None
    send(victim, signal.SIGKILL)
    return Strike(victim.name)


def cut(site: Site, draw: random.Random, *, of_store: bool) -> Strike | None:
    """Nothing passes."""

    def strike(host: Host) -> Heal:
        site.lan.cut(host)
        return partial(site.lan.mend, host)

    return _hit_link(site, draw, of_store, strike)


def worsen(site: Site, draw: random.Random, *, of_store: bool, cable: Cable) -> Strike | None:
    """Frames come late or not at all."""
    return _hit_link(site, draw, of_store, lambda host: BadLink(site.lan, host, cable, draw).mend)


def _hit_link(site: Site, draw: random.Random, of_store: bool, strike: Callable[[Host], Heal]) -> Strike | None:
    """A link that is bad already is no victim."""
    host = site.store if of_store else draw.choice(site.workers)
    if host.name in site.hit_links:
        return None
    site.hit_links.add(host.name)
    mend = strike(host)

    def heal() -> None:
        mend()
        site.hit_links.discard(host.name)

    return Strike(f"link of {host.name}", heal)


def fill(site: Site, draw: random.Random, *, what: str) -> Strike:
    """The disk that logs go to, or memory."""
    host = draw.choice(site.workers)
    return Strike(f"{what} of {host.name}", start_ballast(host, what))


def run_out_of_memory(site: Site, draw: random.Random) -> Strike | None:
    """A host says that its memory is full until Ray's memory monitor has killed one of its workers."""
    host = draw.choice(site.workers)
    before = _workers_of(host)
    end = pretend_full_memory(host)
    deadline = time.monotonic() + MONITOR_S
    while not (gone := before.keys() - _workers_of(host).keys()) and time.monotonic() < deadline:
        time.sleep(0.05)
    end()
    victims = " and ".join(sorted(before[pid] for pid in gone))
    return Strike(f"{victims} on {host.name}") if victims else None


def _workers_of(host: Host) -> dict[int, str]:
    """Ray's workers, which have a title each."""
    found = host.processes("ray::")
    return {one.inner_pid: one.command.partition(" ")[0] for one in found if one.command.startswith("ray::")}


def pick(found: list[Found], draw: random.Random) -> Found | None:
    """A victim, by one draw however many there are."""
    place = draw.random()
    return found[int(place * len(found))] if found else None


FAULTS = (
    Fault("rank killed", partial(kill, role="rank")),
    Fault("rank stopped", partial(stop, role="rank", for_ever=False), lasts_s=6.0),
    Fault("rank stopped for ever", partial(stop, role="rank", for_ever=True)),
    Fault("replica killed", partial(kill, role="replica")),
    Fault("gang's leader killed", kill_leader),
    Fault("replica stopped", partial(stop, role="replica", for_ever=False), lasts_s=6.0),
    Fault("replica stopped for ever", partial(stop, role="replica", for_ever=True)),
    Fault("ingress killed", partial(kill, role="ingress"), may_cut=True),
    Fault("HAProxy killed", partial(kill, role="haproxy"), may_cut=True),
    Fault("controller killed", partial(kill, role="controller")),
    Fault("GCS killed", partial(kill, role="gcs"), may_cut=True),
    Fault("Redis killed", partial(kill, role="redis")),
    Fault("Redis stopped", partial(stop, role="redis", for_ever=False), lasts_s=6.0),
    Fault("link cut for 3 s", partial(cut, of_store=False), lasts_s=3.0, may_cut=True),
    Fault("link cut for 12 s", partial(cut, of_store=False), lasts_s=12.0, may_cut=True),
    Fault("link slow", partial(worsen, of_store=False, cable=SLOW), lasts_s=10.0, may_cut=True),
    Fault("link lossy", partial(worsen, of_store=False, cable=LOSSY), lasts_s=10.0, may_cut=True),
    Fault("Redis cut off", partial(cut, of_store=True), lasts_s=8.0),
    Fault("Redis's link lossy", partial(worsen, of_store=True, cable=LOSSY), lasts_s=10.0),
    Fault("disk full", partial(fill, what=DISK), lasts_s=10.0),
    Fault("memory full", run_out_of_memory, may_cut=True),
    Fault("memory pressure", partial(fill, what=MEMORY), lasts_s=10.0),
)
"""All of them, by name."""
