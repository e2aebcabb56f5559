"""``warmroot deploy --address URL MODEL``."""

import os
from collections.abc import Sequence

from ...cluster.config_file import load_config
from ..serve_config import APP_NAME, serve_config
from .flags import Parser, add_config_flags

DEFAULT_ADDRESS = "http://127.0.0.1:8265"


def main(argv: Sequence[str]) -> int:
    """Deploy a model on a running Ray cluster, and wait until it is served."""
    parser = Parser(
        "warmroot deploy",
        "Serve a model on a running Ray cluster, beside what else it serves. Takes the flags of serve. The cluster's"
        " nodes need Warmroot; secrets come from their environment.",
    )
    add_config_flags(parser)
    parser.add_argument(
        "--address",
        default=os.environ.get("RAY_API_SERVER_ADDRESS", DEFAULT_ADDRESS),
        metavar="URL",
        help=f"Ray's dashboard, also from RAY_API_SERVER_ADDRESS (default: {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--name", default=APP_NAME, metavar="TEXT", help=f"name of the application (default: {APP_NAME})"
    )
    parser.add_argument("--no-wait", action="store_true", help="return once the cluster has taken it")
    flags = vars(parser.read(argv))
    name, address, no_wait = flags.pop("name"), flags.pop("address"), flags.pop("no_wait")
    config_file = flags.pop("config")
    wanted = serve_config(load_config(flags, config_file=config_file), name)
    from ..submit import submit  # brings Ray, which help and bad flags need not wait for

    submit(wanted, address, waits=not no_wait)
    return 0
