"""``warmroot serve MODEL``."""

import os
from collections.abc import Sequence

from ...cluster.config_file import load_config
from .flags import Parser, add_config_flags


def main(argv: Sequence[str]) -> int:
    """Serve until interrupted."""
    parser = Parser("warmroot serve", "Serve a model. Flags, YAML keys and their meanings follow vllm serve.")
    add_config_flags(parser)
    flags = vars(parser.read(argv))
    config_file = flags.pop("config")
    config = load_config(flags, config_file=config_file, environ=os.environ)
    from ..launch import serve  # brings Ray, which help and bad flags need not wait for

    return serve(config)
