"""Keeps the port that Ray Serve opens for plain handles off interfaces on which nobody needs it."""

from typing import Any, cast

import ray
from ray.serve._private import replica


def listen_at_node_address() -> None:
    """Call it in the constructor of a deployment: Serve opens the port after that, at ``[::]``.

    What comes in there is unpickled, without any secret unless Ray's own TLS is on. With the node's address a cluster
    that keeps to loopback is closed to others.
    """
    host = ray.util.get_node_ip_address()
    module = cast(Any, replica)
    add_port = module.add_port_to_grpc_server

    def add_port_there(server: Any, address: str) -> int:
        return add_port(server, address.replace("[::]", f"[{host}]" if ":" in host else host))

    module.add_port_to_grpc_server = add_port_there
