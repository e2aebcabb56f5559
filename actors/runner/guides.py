"""Outputs that keep to a grammar: what may come next in each of them.

A guide follows one output, token by token, and masks the logits of what its grammar does not allow there. Its state is
a function of the output, so a sequence that was preempted or came from another replica begins with what it has. Rows
behind drafted tokens are masked as if the draft had been sampled, and then forgotten again.

Grammars are compiled on a thread of their own while the model computes the prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...cluster.ids import RequestId
from ...cluster.output_grammar import OutputGrammar
from ...router.grammar_library import library, limits, source_of, vocabulary
from ...router.tokenizer import Tokenizer
from ..engine.plan import NewSequence, SequenceResult, StepPlan
from .arrays import Int32s

if TYPE_CHECKING:
    from .sequences import SequenceTable

_MOST_COMPILED = 64
"""Grammars that are kept; those in use live on beside them."""


class Bits:
    """One bit for each token, and how they become a mask: eight by eight from a table, whatever they are.

    A fill that looks at each bit takes ten times as long where about half of the tokens are allowed.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        words = np.zeros(-(-vocab_size // 32), np.int32)
        self.address: int = words.ctypes.data
        self.num_bytes = words.nbytes
        self._bytes = torch.from_numpy(words.view(np.uint8))
        allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        table = np.where(allowed == 1, np.float32(0.0), np.float32("-inf"))
        self._table = torch.from_numpy(table).to(device)
        """[256, 8]: what is added to the logits of eight tokens."""

    def mask(self, logits: torch.Tensor) -> None:
        """Set logits [vocab] whose bit is 0 to -inf."""
        rows = self._bytes.to(self._table.device).int()
        logits += self._table.index_select(0, rows).view(-1)[: len(logits)]


class Guide:
    """One output's place in its grammar."""

    def __init__(self, compiled: "Future[Any]", output: Sequence[int], bits: Bits) -> None:
        """``compiled`` is a matcher at the start; ``output`` what there is already; ``bits`` may be shared."""
        self._compiled = compiled
        self._output = list(output)
        self._matcher: Any = None
        self._bits = bits
        self.error = ""
        """Why it cannot guide any more."""

    def mask(self, logits: torch.Tensor, output: Int32s) -> None:
        """Set logits [vocab] to -inf where the token must not follow ``output``: what was advanced over, and guesses.

        Behind a guess that is wrong itself nothing is masked: that row will not count.
        """
        matcher = self._started()
        if matcher is None:
            return
        ahead = output[len(self._output) :].tolist()
        followed = matcher.try_consume_tokens(ahead) if ahead else 0
        if followed == len(ahead):
            matcher.unsafe_compute_mask_ptr(self._bits.address, self._bits.num_bytes)
            self._bits.mask(logits)
        if followed:
            matcher.rollback(followed)
        self._check()

    def advance(self, token_ids: Sequence[int]) -> bool:
        """The output goes on with these; False, and ``error`` is set, where the grammar does not."""
        matcher = self._started()
        if matcher is not None:
            self._output += token_ids
            for token_id in token_ids:
                if matcher.is_stopped():  # at its end, after which nothing counts
                    break
                if not matcher.consume_token(token_id):
                    self.error = "no token is allowed by both the grammar and the other parameters"
                    break
        return not self.error

    def _started(self) -> Any:
        if self._matcher is None and not self.error:
            try:
                self._matcher = self._compiled.result().deep_copy()
            except Exception as error:  # of the grammar, the library or the tokenizer: not of the other sequences
                self.error = f"the grammar cannot be compiled: {error}"[:300]
                return None
            if self._output and not self._matcher.consume_tokens(self._output):
                self.error = "the output so far does not belong to the grammar"
            self._check()
        return None if self.error else self._matcher

    def _check(self) -> None:
        if not self.error and self._matcher.is_error():
            self.error = f"the grammar cannot be followed: {' '.join(self._matcher.get_error().split())[:200]}"


class Guides:
    """The guides of a rank that samples, and the grammars that it has compiled."""

    def __init__(
        self,
        open_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        """``open_tokenizer`` is called when the first grammar comes; ``vocab_size`` is the number of logits, which are
        on the ``device``, by default a CPU.
        """
        self._bits = Bits(vocab_size, device or torch.device("cpu"))
        self._open_tokenizer = open_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Any = None
        self._compiled: OrderedDict[OutputGrammar, Future[Any]] = OrderedDict()
        self._active: dict[RequestId, Guide] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="warmroot-grammars")

    def begin(self, table: "SequenceTable", plan: StepPlan) -> None:
        """A plan that has been applied to the table is about to run."""
        for request_id in plan.finished:
            self._active.pop(request_id, None)
        for new in plan.new:
            if new.params.grammar is not None:
                table[new.request_id].guide = self._active[new.request_id] = self._guide(new, new.params.grammar)

    def follow(self, results: list[SequenceResult]) -> list[SequenceResult]:
        """Advance over what a step has sampled. What a grammar does not allow becomes an error in its place."""
        return [self._followed(result) for result in results] if self._active else results

    def _followed(self, result: SequenceResult) -> SequenceResult:
        guide = self._active.get(result.request_id)
        if guide is None or not result.token_ids or guide.advance(result.token_ids):
            return result
        return replace(result, token_ids=[], logprobs=None, error=guide.error)

    def _guide(self, new: NewSequence, grammar: OutputGrammar) -> Guide:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Guide(compiled, new.token_ids[new.num_prompt_tokens :], self._bits)

    def _compile(self, grammar: OutputGrammar) -> Any:
        if self._vocabulary is None:
            self._vocabulary = vocabulary(self._open_tokenizer(), self._vocab_size, self._eos_token_ids)
        return library().LLMatcher(self._vocabulary, source_of(grammar), log_level=0, limits=limits())
