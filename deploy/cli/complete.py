"""``warmroot complete "prompt"``."""

import sys
from collections.abc import Sequence

from ...cluster.errors import ConfigError
from .endpoint import Endpoint, add_endpoint_flags, add_sampling_flags, sampling_fields
from .flags import Parser


def main(argv: Sequence[str]) -> int:
    """Print the completion as it comes."""
    parser = Parser("warmroot complete", "Complete a prompt on a running endpoint, streaming to standard output.")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; without it, standard input")
    add_endpoint_flags(parser)
    add_sampling_flags(parser)
    arguments = parser.read(argv)
    prompt = arguments.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError("give a PROMPT, or pipe one in")
        prompt = sys.stdin.read()
    endpoint = Endpoint(arguments.url, arguments.api_key)
    body = {"model": arguments.model or endpoint.model(), "prompt": prompt, **sampling_fields(arguments)}
    for chunk in endpoint.stream("/v1/completions", body):
        for choice in chunk["choices"]:
            print(choice["text"], end="", flush=True)
    print()
    return 0
