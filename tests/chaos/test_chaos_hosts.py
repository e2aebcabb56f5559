"""Faults of links and disks do what they say, on hosts of one's own."""

import random
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ..integration.cluster_harness import wait_until
from ..integration.hosts_harness import Host, Lan, new_lan
from .bad_link import Cable
from .ballast import DISK, pretend_full_memory, start_ballast
from .links import BadLink
from .site import why_no_site

pytestmark = pytest.mark.skipif(why_no_site() is not None, reason=str(why_no_site()))

ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 7777))
while True:
    data, sender = server.recvfrom(2000)
    server.sendto(data, sender)
"""


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    with new_lan("wrc") as lan:
        host = lan.add_host()
        host.start([sys.executable, "-c", ECHO], {})
        wait_until(lambda: answered(host, 1) == 1)
        yield lan


def answered(host: Host, number: int, patience_s: float = 1.0) -> int:
    """How many of so many datagrams come back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(patience_s)
        for n in range(number):
            client.sendto(str(n).encode(), (host.address, 7777))
        back = set()
        try:
            while len(back) < number:
                back.add(client.recv(2000))
        except TimeoutError:
            pass
        return len(back)


def test_a_link_is_cut_and_mended(lan: Lan):
    [host] = lan.hosts
    lan.cut(host)
    assert answered(host, 3, 0.3) == 0
    lan.mend(host)
    wait_until(lambda: answered(host, 3) == 3)


def test_a_bad_cable_loses_frames_until_it_is_mended(lan: Lan):
    [host] = lan.hosts
    link = BadLink(lan, host, Cable(delay_s=0.0, jitter_s=0.001, loss=0.3), random.Random(1))
    assert answered(host, 20) > 0  # neighbours are asked for again until they answer
    assert 10 < answered(host, 100) < 90
    link.mend()
    wait_until(lambda: answered(host, 50) == 50)


def test_a_slow_cable_loses_nothing(lan: Lan):
    [host] = lan.hosts
    link = BadLink(lan, host, Cable(delay_s=0.4, jitter_s=0.1, loss=0.0), random.Random(1))
    assert answered(host, 5, 0.35) == 0
    assert answered(host, 5, 20.0) == 5
    link.mend()
    wait_until(lambda: answered(host, 5, 0.35) == 5)


def test_memory_is_full_as_far_as_a_host_is_told(lan: Lan):
    [host] = lan.hosts
    end = pretend_full_memory(host)
    assert available(host) == 100_000
    end()
    assert available(host) > 200_000


def available(host: Host) -> int:
    """kB of memory."""
    told = host.start(["cat", "/proc/meminfo"], {"PATH": "/bin"}, stdout=subprocess.PIPE).communicate()[0]
    return int(next(line for line in told.splitlines() if line.startswith("MemAvailable")).split()[1])


def test_a_disk_is_full_until_it_is_emptied(lan: Lan):
    [host] = lan.hosts
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(host.scratch)]
    assert host.start(mount, {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}).wait(20) == 0
    assert writes(host)
    empty = start_ballast(host, DISK)
    assert not writes(host)
    empty()
    assert writes(host)


def writes(host: Host) -> bool:
    script = f"import pathlib; p = pathlib.Path('{host.scratch}/probe'); p.write_bytes(bytes(100_000)); p.unlink()"
    return host.start([sys.executable, "-c", script], {}, stderr=subprocess.DEVNULL).wait(20) == 0
