"""What ``train-medusa`` and ``train-draft`` share: flags, texts, features, and how a training is shown and left."""

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from ...actors.models.loader import load_model
from ...actors.models.source import resolve_model
from ...actors.runner.load import KvMemoryConfig, default_device, kv_memory_for
from ...actors.runner.runner import ModelRunner
from ...actors.runner.threads import use_threads
from ...actors.training.corpus import Corpus, Text, Turns, read_data
from ...actors.training.features import Features
from ...actors.training.trainer import Schedule, Task, Trainer
from ...actors.training.vocabulary import Vocabulary
from ...actors.training.writer import Writer
from ...cluster.errors import ConfigError
from ...cluster.kv_layout import KvLayout
from ...router.chat_template import ChatTemplate
from ...router.tokenizer import Tokenizer
from ..progress_display import ProgressDisplay

TEXTS, FEATURES, STATE = "texts.jsonl", "features-{}.safetensors", "training.pt"
_LINE_S = 30.0
"""Between lines where there is no terminal for a bar."""
_BLOCK_SIZE = 16
_LONGEST_PROMPT = 256
_SMOOTHED = 50


class Display(ProgressDisplay):
    """One bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        share = TextColumn("{task.percentage:>3.0f} %")
        super().__init__(console, share, TimeElapsedColumn(), TimeRemainingColumn())
        self._task = self._progress.add_task("", total=1.0)
        self._shown = float("-inf")

    def begin(self, text: str) -> None:
        """Another stage."""
        self._progress.reset(self._task, total=1.0, description=text)
        self._shown = float("-inf")
        self.show(0.0, text)

    def show(self, done: float, text: str) -> None:
        """A share of the stage, 0 to 1, is done."""
        self._progress.update(self._task, completed=done, description=text)
        now = time.monotonic()
        if not self.console.is_terminal and now - self._shown >= _LINE_S:
            self._shown = now
            self.console.print(f"{text}  {done:.0%}", markup=False)


@dataclass(frozen=True, slots=True)
class Lessons:
    """What there is to learn from, and to measure with."""

    train: list[Text]
    held_out: list[Text]
    train_features: Features
    held_out_features: Features
    vocabulary: Vocabulary


class Training:
    """One run over an output folder, which a later run with the same arguments goes on with."""

    def __init__(self, options: Namespace, display: Display) -> None:
        """Raises ModelLoadError, ConfigError."""
        self._options = options
        self._display = display
        self.output: Path = options.output
        self.output.mkdir(parents=True, exist_ok=True)
        self.path = resolve_model(options.model, progress=display.console.print)
        self.began = time.monotonic()
        use_threads(options.threads)
        torch.manual_seed(options.seed)
        display.begin("loading the model")
        self.decoder = load_model(self.path, dtype="auto", device=default_device())

    def lessons(self) -> Lessons:
        """Texts are written, and read by the model, as far as an earlier run has not done it."""
        corpus = Corpus(self.output / TEXTS)
        self._write(corpus)
        train, held_out = corpus.split()
        if not train:
            raise ConfigError("--tokens: too few for a text to learn from and one to measure with")
        spec = self.decoder.spec
        vocabulary = Vocabulary.most_frequent(train, spec.vocab_size, self._options.vocabulary, spec.eos_token_ids)
        self._display.console.print(
            f"{corpus.num_written:,} tokens in {len(corpus.texts):,} texts; {vocabulary.size:,} tokens make up"
            f" {vocabulary.coverage(held_out):.1%} of those that were held out"
        )
        lessons = Lessons(
            train, held_out, self._features("train", train), self._features("held-out", held_out), vocabulary
        )
        torch.set_num_threads(self._options.threads)  # from here on torch computes
        return lessons

    def _write(self, corpus: Corpus) -> None:
        wanted = self._options.tokens
        if corpus.num_written >= wanted:
            return
        self._display.begin("writing texts")
        for _ in corpus.add(takewhile(lambda _: corpus.num_written < wanted, self._source(corpus))):
            written = corpus.num_written
            self._display.show(min(1.0, written / wanted), f"writing texts: {written:,} of {wanted:,} tokens")

    def _source(self, corpus: Corpus) -> Iterator[Text]:
        options, spec = self._options, self.decoder.spec
        tokenizer = Tokenizer.from_path(self.path)
        template = tokenizer.chat_template
        turns = Turns.of(
            tokenizer, (template and ChatTemplate(template, tokenizer.special_tokens, now=datetime.now)) or None
        )
        longest = _LONGEST_PROMPT + options.max_tokens
        kv = KvMemoryConfig(num_kv_blocks=1 + options.streams * -(-longest // _BLOCK_SIZE))
        layout = KvLayout.of(spec.layer_windows, kv.block_size)
        kv_dtype, num_blocks = kv_memory_for(self.decoder, layout, kv, None, options.streams)
        runner = ModelRunner(self.decoder, layout, num_blocks, kv_dtype=kv_dtype, max_num_seqs=options.streams)
        seed = options.seed + len(corpus.texts) * 2**32  # a later run writes other texts
        writer = Writer(runner, spec, turns, streams=options.streams, max_tokens=options.max_tokens, seed=seed)
        if options.data is None:
            yield from writer.conversations()
            return
        texts, prompts = read_data(options.data, tokenizer, turns, longest)
        yield from texts
        yield from writer.answers(iter(prompts))

    def _features(self, name: str, texts: list[Text]) -> Features:
        path = self.output / FEATURES.format(name)
        if path.exists():
            features = Features.load(path)
            if len(features.firsts) == len(texts):
                return features
        title = f"reading texts ({name})"
        self._display.begin(title)
        features = Features.of(
            self.decoder, texts, lambda done: self._display.show(done / len(texts), f"{title}: {done} of {len(texts)}")
        )
        features.save(path)
        return features

    def train(self, module: nn.Module, task: Task, batch_size: int) -> Trainer:
        """Train until the time or the epochs are over."""
        options = self._options
        schedule = Schedule(
            seconds=60 * options.minutes,
            epochs=options.epochs,
            batch_size=batch_size,
            learning_rate=options.learning_rate,
        )
        trainer = Trainer(module, task, schedule, self.output / STATE, time.monotonic)
        self._display.begin("training")
        for step in trainer.run():
            loss = _mean([loss for _, loss in trainer.losses[-_SMOOTHED:]])
            self._display.show(step.done, f"training: loss {loss:.3f}, epoch {trainer.epochs:.1f}")
        return trainer

    def finish(self, trainer: Trainer, lessons: Lessons, figures: dict[str, Any]) -> None:
        """Leave the figures and the plot, and delete what only a run that goes on needs."""
        facts = {
            "held_out": figures,
            "vocabulary": lessons.vocabulary.size,
            "coverage": lessons.vocabulary.coverage(lessons.held_out),
            "tokens": sum(text.num_written for text in lessons.train),
            "epochs": trainer.epochs,
            "training_s": trainer.losses[-1][0] if trainer.losses else 0.0,
            "threads": self._options.threads,
        }
        (self.output / "acceptance.json").write_text(json.dumps(facts, indent=2) + "\n")
        for name in ("train", "held-out"):
            (self.output / FEATURES.format(name)).unlink()
        self._plot(trainer.losses)

    def _plot(self, losses: list[tuple[float, float]]) -> None:
        try:
            from .loss_plot import draw_losses
        except ImportError:
            self._display.console.print("no plot: pip install 'warmroot[bench]'")
            return
        draw_losses(losses, self.output / "loss.png")


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


def run(options: Namespace, train: Callable[[Training], dict[str, Any]]) -> int:
    """Train, and print what became of it as JSON; progress goes to stderr."""
    with Display(Console(stderr=True, highlight=False)) as display:
        training = Training(options, display)
        figures = train(training)
    print(json.dumps(figures))
    return 0
