"""``warmroot config MODEL``."""

from collections.abc import Sequence

import yaml

from ...cluster.config_file import load_config
from ..serve_config import APP_NAME, serve_config
from .flags import Parser, add_config_flags


def main(argv: Sequence[str]) -> int:
    """Print the Serve config that serves a model."""
    parser = Parser(
        "warmroot config",
        "Print a Serve config: for `serve deploy`, and as serveConfigV2 of a RayService. Takes the flags of serve.",
    )
    add_config_flags(parser)
    parser.add_argument(
        "--name", default=APP_NAME, metavar="TEXT", help=f"name of the application (default: {APP_NAME})"
    )
    flags = vars(parser.read(argv))
    name, config_file = flags.pop("name"), flags.pop("config")
    config = load_config(flags, config_file=config_file)
    print(yaml.safe_dump(serve_config(config, name), sort_keys=False), end="")
    return 0
