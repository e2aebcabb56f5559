"""The ``warmroot`` command. Each subcommand is a module of its name with ``main(argv)``, imported when called."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from ...cluster.errors import ClientError, ModelLoadError, WarmrootError

COMMANDS = {
    "serve": "serve a model: OpenAI-compatible endpoint, replicas, warm-prefix routing",
    "config": "print the Serve config that serves a model, for KubeRay and serve deploy",
    "deploy": "serve a model on a running Ray cluster",
    "keys": "make, list and revoke API keys in a file that a server reads",
    "chat": "chat with a running endpoint",
    "complete": "complete a prompt on a running endpoint",
    "update-weights": "give a running model other weights, without a restart",
    "status": "show the models, replicas and load of a running endpoint",
    "top": "watch a running endpoint: figures, replicas, hot prefixes, decisions",
    "plan": "say what a model needs and how many sequences fit",
    "simulate": "replay a trace on simulated replicas, under any routing policy",
    "train-medusa": "train heads that guess several tokens ahead of a model",
    "train-draft": "train a small model that drafts for a model",
    "quantize": "write a checkpoint with quantised weights: rounding, GPTQ or AWQ",
    "calibrate": "measure a replica's step costs, for simulate",
    "bench": "measure: engine, routing, KV, weights and more",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 it failed, 2 the user can mend it, 130 interrupted."""
    arguments = _parser().parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    try:
        return import_module("." + arguments.command.replace("-", "_"), __name__).main(arguments.arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left; Python's flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if os.environ.get("WARMROOT_DEBUG") == "1":
            raise
        print(f"warmroot {arguments.command}: {_explain(error)}", file=sys.stderr)
        return 2 if isinstance(error, (ClientError, ModelLoadError)) else 1


def _explain(error: Exception) -> str:
    if isinstance(error, WarmrootError):
        return " ".join(error.message.split())
    return f"unexpected {type(error).__name__}: {error}. WARMROOT_DEBUG=1 shows where."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroot",
        description="LLM serving on Ray that sends each request to the replica where its prefix is still warm.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<14}{text}" for name, text in COMMANDS.items())
        + "\n\nwarmroot COMMAND --help describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return parser


class _Version(argparse.Action):
    """Reads the package's metadata only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"warmroot {version('warmroot')}")
        parser.exit()
