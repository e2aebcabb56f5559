"""``warmroot update-weights WEIGHTS``."""

from collections.abc import Sequence

from rich.console import Console

from ...cluster.weights_update import UPDATE_MODES
from .endpoint import Endpoint, add_endpoint_flags
from .flags import Parser


def main(argv: Sequence[str]) -> int:
    """Give a running model other weights; returns once all replicas have them."""
    parser = Parser(
        "warmroot update-weights",
        "Give a running model other weights of the same architecture, without a restart. If anything fails before the"
        " replicas change, all stay as they were. Needs an admin's key where there are keys.",
    )
    add_endpoint_flags(parser)
    parser.add_argument("weights", help="model folder, GGUF file or hub id, which every node has")
    parser.add_argument("--model", help="a served name (default: the first one)")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    parser.add_argument("--version", metavar="TEXT", help="name of the weights (default: the checkpoint's fingerprint)")
    parser.add_argument(
        "--mode",
        choices=UPDATE_MODES,
        default="wait",
        help="what becomes of running requests: wait for their end, abort them, or let them go on in place"
        " (default: wait)",
    )
    parser.add_argument("--one-by-one", action="store_true", help="replicas change in turn, while the others go on")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds that running requests have (default: 600)"
    )
    arguments = vars(parser.read(argv))
    endpoint = Endpoint(arguments.pop("url"), arguments.pop("api_key"))
    report = endpoint.post(
        "/admin/update_weights", {key: value for key, value in arguments.items() if value is not None}
    )
    console = Console()
    console.print(f"loaded in {report['load_s']:.1f} s; weights are {report['weights_version']} now", highlight=False)
    for one in report["replicas"]:
        console.print(f"  {one['replica']} changed within {one['seconds']:.2f} s", highlight=False)
    for replica in report["lost"]:
        console.print(f"  {replica} was lost; the one in its place begins with these weights", highlight=False)
    return 0
