"""``warmroot calibrate MODEL``: step costs of a replica on this machine, for ``warmroot simulate --costs``."""

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

from ...actors.models.source import resolve_model
from ..bench.contender import Contender
from ..bench.precision import OURS
from ..simulate.costs import ReplicaCosts
from ..simulate.fit import fit_costs
from .flags import Parser

_CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
_BATCHES = (1, 4, 16)
_CONTEXTS = (64, 256, 1024)
_CHUNK_SAMPLE = 256
"""The prompt that a replica measures at its start."""


def main(argv: Sequence[str]) -> int:
    """Measure, fit, and print or write the JSON."""
    options = _parser().read(argv)
    console = Console(stderr=True, highlight=False)
    costs = _measured(options, console)
    if options.output:
        options.output.write_text(costs.to_json() + "\n")
        console.print(f"written: {options.output}")
    else:
        print(costs.to_json())
    return 0


def _parser() -> Parser:
    parser = Parser("warmroot calibrate", "Measure a replica's step costs on this machine, for warmroot simulate.")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--dtype", choices=OURS, default="fp16", help="precision of the weights")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of the replica")
    add("--kv-tokens", type=int, default=16384, help="KV memory of the replica that is to be simulated")
    add("--max-num-seqs", type=int, default=256, help="as for warmroot serve")
    add("--max-num-batched-tokens", type=int, default=2048, help="as for warmroot serve")
    add("--seconds", type=float, default=0.5, help="for each point")
    add("--output", type=Path, help="file to write; default: stdout")
    return parser


def _measured(options: Namespace, console: Console) -> ReplicaCosts:
    # Not before it is needed: it imports torch.
    from ...actors.engine_host import MAX_DECODE_DELAY_S, MIN_CHUNK
    from ..bench.lineup import our_entry

    common = {"threads": options.threads, "max_num_seqs": max(_BATCHES), "max_model_len": None, "seed": 0}
    options.llama_python = None
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="warmroot-calibrate-")))
        entry = our_entry(options, common, options.dtype, resolve_model(options.model), scratch)
        settings = {**entry.settings, "seconds": options.seconds}
        weights = {} if entry.gguf is None else {"model": str(entry.gguf.path(console.print))}
        console.print(f"measuring {entry.name}")
        contender = Contender(entry.name, "curve_peer", {**settings, **weights}, entry.python)
        stack.callback(contender.close)
        prefills = [(tokens, _seconds(contender, "prefill", length=tokens)) for tokens in _CHUNKS]
        points = [(batch, context) for batch in _BATCHES for context in _CONTEXTS]
        decodes = [(b, c, _seconds(contender, "decode", batch=b, context=c)) for b, c in points]
    rate = max(tokens / seconds for tokens, seconds in prefills if seconds and tokens == _CHUNK_SAMPLE)
    return fit_costs(
        [(tokens, seconds) for tokens, seconds in prefills if seconds],
        [(batch, context, seconds) for batch, context, seconds in decodes if seconds],
        kv_tokens=options.kv_tokens,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_chunk=max(MIN_CHUNK, int(rate * MAX_DECODE_DELAY_S)),
    )


def _seconds(contender: Contender, method: str, **arguments: int) -> float:
    """Median of a point's steps; 0 where there is no room for it."""
    moments = contender.call(method, **arguments)
    return median(moments) if moments else 0.0
