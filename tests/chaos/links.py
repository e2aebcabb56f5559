"""Links of hosts that are cut, slow or lossy."""

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from ..integration.hosts_harness import Host, Lan
from .bad_link import Cable

SLOW = Cable(delay_s=0.15, jitter_s=0.1, loss=0.0)
LOSSY = Cable(delay_s=0.0, jitter_s=0.002, loss=0.1)


class BadLink:
    """Puts a bad cable between a host and the switch until ``mend``; nobody is told."""

    def __init__(self, lan: Lan, host: Host, cable: Cable, draw: random.Random) -> None:
        self._lan, self._host = lan, host
        number = lan.hosts.index(host)
        self._bridge, self._near, self._far = f"bad{number}", f"near{number}", f"far{number}"
        command = [sys.executable, str(Path(__file__).with_name("bad_link.py")), self._near, self._far]
        command += cable.arguments(draw.randrange(2**31))
        self._forwarder = lan.start_at_switch(command)
        for words in (
            f"link add {self._bridge} type bridge",
            f"link set {self._bridge} up",
            f"link set {self._near} master {self._bridge} up",
            f"link set {self._far} master lan up",
            f"link set {host.name} master {self._bridge}",
        ):
            lan.at_switch("ip", *words.split())

    def mend(self) -> None:
        """A good cable again."""
        self._lan.mend(self._host)
        self._lan.at_switch("ip", "link", "delete", self._bridge)
        assert self._forwarder.stdin is not None
        self._forwarder.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._forwarder.wait(5.0)
        self._forwarder.kill()
