"""``warmroot bench kv``: KV formats side by side: bytes, decode speed at long contexts, and quality."""

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from statistics import median

import torch

from ...actors.attention.kv_memory import KvType
from ...actors.models.decoder import Decoder
from ...actors.models.loader import load_model
from ...actors.models.source import resolve_model
from ...actors.runner.threads import use_threads
from ...cluster.kv_formats import KV_FORMATS
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from .kv_measure import Quality, Sequences, compare, decode_seconds, log_probs
from .quality import QualitySizes, text_facts, windows
from .report import Report

REFERENCE = "fp16"
FORMATS = ("fp8", "int8", "k8v4", "int4")
_BYTES = {"fp8": 0.55, "int8": 0.55, "k8v4": 0.42, "int4": 0.32}
_PERPLEXITY = {"int8": 1.005, "k8v4": 1.02, "int4": 1.06}
_SLOWEST = {"int8": 0.9}
"""Decode tokens/s at the longest context, of those with 16-bit KV."""
_BLOCK_SIZE = 16
_WARM_STEPS = 4
_CAPACITY_BYTES = 1 << 30


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    options = _parse(argv)
    with Report("kv", vars(options), json_only=options.json) as report:
        use_threads(options.threads)
        path = resolve_model(options.model)
        decoder = load_model(path, dtype="auto", device=torch.device("cpu"))
        with torch.inference_mode():
            _bytes(decoder, report)
            _speed(decoder, options, report)
            # Quantised weights quantise activations, which makes more of any difference than it is.
            dense = load_model(path, dtype="auto", quantization="none", device=torch.device("cpu"))
            _quality(dense, Tokenizer.from_path(path), options, report)
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench kv", "KV formats side by side: bytes, decode speed at long contexts, and quality.")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    add("--contexts", type=int, nargs="+", default=[1024, 4096], help="tokens before those that are timed")
    add("--streams", type=int, default=1, help="sequences that decode together")
    add("--steps", type=int, default=64, help="timed steps of each format")
    add("--windows", type=int, default=20, help="windows of the text that is scored")
    add("--window", type=int, default=1025, help="tokens of a window, all but the first of which are scored")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.contexts, options.steps, options.windows, options.window = [64, 96], 3, 1, 65
    return options


def _kv_type(name: str) -> KvType:
    return torch.float16 if name == REFERENCE else KV_FORMATS[name]


def _bytes(decoder: Decoder, report: Report) -> None:
    pages = {
        name: Sequences(decoder, _kv_type(name), 1, _BLOCK_SIZE, _BLOCK_SIZE).page_bytes
        for name in (REFERENCE, *FORMATS)
    }
    shares = {name: size / pages[REFERENCE] for name, size in pages.items()}
    report.result["memory"] = {
        name: {
            "bytes_per_token": size / _BLOCK_SIZE,
            "share": shares[name],
            "blocks_per_gib": _CAPACITY_BYTES // size,
        }
        for name, size in pages.items()
    }
    rows = [
        (name, f"{size / _BLOCK_SIZE:,.1f}", f"{shares[name]:.4f}", f"{_CAPACITY_BYTES // size:,}")
        for name, size in pages.items()
    ]
    report.table("Bytes, scales included", ("", "per token", f"of {REFERENCE}", "blocks in 1 GiB"), rows)
    for name, most in _BYTES.items():
        report.bar(f"bytes, {name} / {REFERENCE}", shares[name], most, at_least=False)


def _speed(decoder: Decoder, options: Namespace, report: Report) -> None:
    names = (REFERENCE, *FORMATS)
    result: dict[str, dict[str, dict[str, float]]] = {}
    rows: list[tuple[str, ...]] = []
    for context in options.contexts:
        report.note(f"decoding behind {context} tokens")
        seconds = _decode(decoder, names, context, options)
        # Formats take turns, so the ratio of neighbours is not touched by what else the machine does.
        ratios = {name: median(a / b for a, b in zip(seconds[REFERENCE], seconds[name], strict=True)) for name in names}
        result[str(context)] = {
            name: {"tokens_per_s": options.streams / median(seconds[name]), "ratio": ratios[name]} for name in names
        }
        figures = [f"{options.streams / median(seconds[name]):.1f} ({ratios[name]:.2f})" for name in names]
        rows.append((str(context), *figures))
    report.result["decode"] = result
    report.table(f"Decode tokens/s, layers only (times {REFERENCE})", ("context", *names), rows)
    longest = str(max(options.contexts))
    for name, least in _SLOWEST.items():
        report.bar(f"decode at {longest}, {name} / {REFERENCE}", result[longest][name]["ratio"], least)


def _decode(decoder: Decoder, names: Sequence[str], context: int, options: Namespace) -> dict[str, list[float]]:
    steps = options.steps + _WARM_STEPS
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(decoder.spec.vocab_size, (options.streams, context), generator=generator)
    contenders: list[Sequences] = []
    for name in names:
        contenders.append(Sequences(decoder, _kv_type(name), options.streams, context + steps, _BLOCK_SIZE))
        contenders[-1].fill(prompt)
    seconds = decode_seconds(contenders, steps)
    return {name: times[_WARM_STEPS:] for name, times in zip(names, seconds, strict=True)}


def _quality(decoder: Decoder, tokenizer: Tokenizer, options: Namespace, report: Report) -> None:
    texts = windows(tokenizer.encode, QualitySizes(options.windows, options.window))
    names = (REFERENCE, *FORMATS)
    sequences = {name: Sequences(decoder, _kv_type(name), 1, options.window, _BLOCK_SIZE) for name in names}
    totals = {name: Quality(0.0, 0.0, 0, 0) for name in names}
    for number, text in enumerate(texts, 1):
        report.note(f"scoring window {number} of {len(texts)}")
        reference = log_probs(decoder, sequences[REFERENCE], text)
        for name in names:
            ours = reference if name == REFERENCE else log_probs(decoder, sequences[name], text)
            totals[name] = totals[name].plus(compare(ours, reference, text))
    perplexity = {name: math.exp(total.nll / total.tokens) for name, total in totals.items()}
    report.result["quality_text"] = text_facts(texts)
    report.result["quality"] = {
        name: {
            "perplexity": perplexity[name],
            "perplexity_ratio": perplexity[name] / perplexity[REFERENCE],
            "mean_kl": total.kl / total.tokens,
            "greedy_agreement": total.agreed / total.tokens,
        }
        for name, total in totals.items()
    }
    rows = [
        (
            name,
            f"{perplexity[name]:.4f}",
            f"{100 * (perplexity[name] / perplexity[REFERENCE] - 1):+.2f} %",
            f"{total.kl / total.tokens:.5f}",
            f"{total.agreed / total.tokens:.2%}",
        )
        for name, total in totals.items()
    ]
    report.table(f"Quality, {totals[REFERENCE].tokens} tokens", ("", "perplexity", "", "mean KL", "same argmax"), rows)
    for name, most in _PERPLEXITY.items():
        ratio = perplexity[name] / perplexity[REFERENCE]
        report.bar(f"perplexity, {name} / {REFERENCE}", ratio, most, at_least=False)
