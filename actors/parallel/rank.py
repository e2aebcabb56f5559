"""One rank of a gang, in whatever process hosts it."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from ...cluster.errors import RankLostError
from ...cluster.kv_layout import KvLayout
from ...router.tokenizer import Tokenizer
from ..engine.plan import StepPlan
from ..kernels.library import native
from ..layers.moe_balance import ExpertBalancer
from ..models.available import kernels_on
from ..models.decoder import Decoder
from ..models.loader import load_model
from ..models.weights import Progress, WeightSource
from ..runner.guides import Guides
from ..runner.load import kv_memory_for
from ..runner.load_drafter import draft_page_bytes
from ..runner.memory import page_bytes
from ..runner.next_weights import NextWeights
from ..runner.runner import ModelRunner
from ..runner.threads import use_threads
from .collectives import Collectives
from .gang_config import GangConfig, Meeting, RankReport, RankTimes, StoreAddress
from .groups import RankLists, make_groups
from .memory_use import held_bytes, peak_bytes
from .plan_receiver import PlanReceiver
from .rank_drafts import RankDrafts, load_draft
from .rendezvous import join_store, serve_store
from .shard import Shard
from .stage import PipelineStage, StageDecoder

OnLost = Callable[[RankLostError], None]


class RankLoop:
    """Plans from the leader to the runner, and what it sampled back."""

    def __init__(
        self,
        runner: ModelRunner,
        receiver: PlanReceiver,
        expect: Callable[[int], None],
        *,
        samples: bool,
        idle: Callable[[], None] | None = None,
        after_step: Callable[[], object] | None = None,
    ) -> None:
        """Ranks that sample append what they sampled, and answer. ``expect`` is a ``PipelineStage``'s.

        ``idle`` takes the place of a step without tokens, where other groups may have some. ``after_step`` is called
        when the answer is out.
        """
        self.num_steps = 0
        self.idle_s = 0.0
        """Waiting for plans."""
        self.step_s = 0.0
        self.model_s = 0.0
        """Of that, in the model, and in what follows the answer."""
        self._runner = runner
        self._receiver = receiver
        self._samples = samples
        self._idle = idle
        self._after_step = after_step
        self._expect = expect
        self._is_expected = False

    def run(self) -> None:
        """Until the leader closes the gang. Raises RankLostError."""
        done = time.perf_counter()
        while (delivery := self._receiver.receive()) is not None:
            began = time.perf_counter()
            self.idle_s += began - done
            if not self._samples:
                self._runner.learn(delivery.sampled)
            self._expect_steps(delivery.plan)
            ready = time.perf_counter()
            self._runner.submit(delivery.plan)
            result = self._runner.result()
            if self._idle is not None and not delivery.plan.num_tokens:
                self._idle()
            computed = time.perf_counter()
            if self._samples or result.error is not None:
                self._receiver.reply(result)
            answered = time.perf_counter()
            if self._after_step is not None:
                self._after_step()
            done = time.perf_counter()
            self.model_s += computed - ready + done - answered
            self.step_s += done - began
            self.num_steps += 1

    def _expect_steps(self, plan: StepPlan) -> None:
        """The hidden states of this step, if they were not expected beside the one before, and of the next one."""
        if not self._is_expected:
            self._expect(plan.num_tokens)
        following = self._receiver.next_plan()
        self._is_expected = following is not None
        if following is not None:
            self._expect(following.num_tokens)


class Rank:
    """Joins its gang, then runs until the leader closes it. Call the methods once, in their order."""

    def __init__(self, rank: int, address: str, device: torch.device) -> None:
        """``address`` is this machine's, as the other ranks reach it."""
        self._rank = rank
        self._address = address
        self._device = device
        self._store: Store | None = None
        self._loop: RankLoop | None = None

    def serve_store(self, start_s: float) -> StoreAddress:
        """On rank 0 only, before any rank joins: where they meet."""
        store = serve_store(self._address, start_s)
        self._store = store
        return self._address, store.port

    def join(self, config: GangConfig, meeting: Meeting, progress: Progress | None = None) -> RankReport:
        """Meet the others and load this rank's part. Raises ModelLoadError, ConfigError, RankLostError."""
        num_threads = use_threads(config.threads_per_rank)
        layout = config.layout()
        self._config, self._meeting = config, meeting
        store = self._store or join_store(*meeting.store, config.start_s)
        votes = _Votes(store, self._rank, config.topology.world_size)
        votes.least("here", 0)
        self._groups = make_groups(
            self._rank,
            RankLists.of(config.topology, self._rank),
            store,
            address=self._address,
            device=self._device,
            library=native(),
            deadline_s=config.step_s,
        )
        whole = KvLayout.of(layout.spec.layer_windows, config.kv.block_size)
        self._runner = self._load(Shard(layout, self._rank, self._groups), whole, votes, progress)
        return RankReport(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            peak_memory_bytes=peak_bytes(self._held_bytes + self._kv_bytes),
            layout=whole,
            num_blocks=self._runner.num_blocks,
            kv_dtype=str(self._runner.kv_dtype).removeprefix("torch."),
            weights_format=self._runner.decoder.weights_format,
            kernels=kernels_on(self._device),
            num_threads=num_threads,
        )

    def _load(self, shard: Shard, whole: KvLayout, votes: "_Votes", progress: Progress | None) -> ModelRunner:
        config, world_size = self._config, self._config.topology.world_size
        decoder = load_model(
            config.path,
            dtype=config.dtype,
            quantization=config.quantization,
            device=self._device,
            progress=progress,
            shard=shard,
        )
        draft = load_draft(config, shard, self._device)
        self._held_bytes = held_bytes()
        layout = whole.stage(shard.own.layers)
        memory = config.kv.kv_cache_memory
        kv = config.kv._replace(
            kv_cache_memory=None if memory is None else memory // world_size,
            num_sharers=config.kv.num_sharers * world_size,
        )
        kv_dtype, num_blocks = kv_memory_for(decoder, layout, kv, config.max_model_len, config.max_num_seqs, draft)
        stage = self._stage = PipelineStage(decoder, shard.groups.pp)
        self._balancer = _balancer(decoder, shard.groups.ep, config.expert_balance_steps)
        num_blocks = votes.least("KV blocks", num_blocks)
        self._kv_bytes = num_blocks * page_bytes(decoder.spec, layout, kv_dtype)
        if draft is not None:
            self._kv_bytes += num_blocks * draft_page_bytes(draft.spec, decoder.spec, layout, kv_dtype)
        drafts = self._drafts = RankDrafts(config, shard, decoder)
        self._next = NextWeights(decoder, shard, dtype=config.dtype, quantization=config.quantization)
        runner = ModelRunner(
            decoder,
            layout,
            num_blocks,
            kv_dtype=kv_dtype,
            max_num_seqs=config.max_num_seqs,
            forward=stage.forward if stage.group.size > 1 else None,
            make_drafter=drafts.drafter(layout, num_blocks, kv_dtype, draft),
            acceptance_threshold=None if config.speculation is None else config.speculation.acceptance_threshold,
            guides=_guides(config, decoder) if shard.own.samples else None,
        )
        runner.renew_with(self._next, lambda: self._balance_anew(shard))
        return runner

    def prepare(self, version: str, source: WeightSource | Path) -> str:
        """Load this rank's part of other weights beside its own; see ``NextWeights``. While the rank runs."""
        return self._next.prepare(version, source)

    def discard(self) -> None:
        """Drop what was prepared."""
        self._next.discard()

    def _balance_anew(self, shard: Shard) -> None:
        """New weights have their experts where all had them at the start."""
        self._balancer = _balancer(self._stage.decoder, shard.groups.ep, self._config.expert_balance_steps)

    def _after_step(self) -> None:
        if self._balancer is not None:
            self._balancer.after_step()

    def _idle(self) -> None:
        """A step that computes nothing here."""
        self._stage.idle()
        self._drafts.idle()

    def run(self, on_lost: OnLost) -> None:
        """Answer plans until the leader closes the gang. Raises RankLostError.

        ``on_lost`` is called from another thread as soon as the leader is lost: this one may hang in a collective.
        """
        config, meeting = self._config, self._meeting
        receiver = PlanReceiver(
            meeting.leader,
            meeting.token,
            self._rank,
            connect_s=config.step_s,
            deadline_s=config.step_s,
            on_lost=on_lost,
        )
        topology = config.topology
        self._loop = RankLoop(
            self._runner,
            receiver,
            self._stage.expect,
            samples=topology.samples(self._rank),
            idle=self._idle if topology.exchanges_tokens else None,
            after_step=None if self._balancer is None else self._after_step,
        )
        try:
            self._loop.run()
        finally:
            receiver.close()
            self._groups.close()

    def times(self) -> RankTimes:
        """So far. May be called from another thread while it runs."""
        loop = self._loop
        if loop is None:
            return RankTimes(rank=self._rank, num_steps=0, idle_s=0.0, bubble_s=0.0, busy_s=0.0)
        bubble_s, balancer, traffic = self._stage.waited_s, self._balancer, self._groups.traffic
        is_first = self._rank % self._config.topology.stage_size == 0
        return RankTimes(
            rank=self._rank,
            num_steps=loop.num_steps,
            idle_s=loop.idle_s,
            bubble_s=bubble_s,
            busy_s=loop.model_s - bubble_s,
            communication_s=sum(traffic.seconds.values()),
            control_s=loop.step_s - loop.model_s,
            cpu_s=time.process_time(),
            num_bytes=dict(traffic.num_bytes),
            num_calls=dict(traffic.num_calls),
            expert_rows=sum(mlp.num_rows for mlp in self._stage.decoder.sparse_mlps.values()),
            experts=() if balancer is None or not is_first else balancer.balances,
        )


def _guides(config: GangConfig, decoder: Decoder) -> Guides:
    spec, source = decoder.spec, config.tokenizer or config.path
    return Guides(lambda: Tokenizer.from_path(source), spec.vocab_size, spec.eos_token_ids, decoder.device)


def _balancer(decoder: StageDecoder, ep: Collectives, period: int) -> ExpertBalancer | None:
    """None where there is nothing to balance."""
    layers = decoder.sparse_mlps
    return ExpertBalancer(layers, ep, period=period) if layers and ep.size > 1 and period else None


class _Votes:
    """Numbers that all ranks agree on before there is a deadline between them: one loads longer than another."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def least(self, subject: str, value: int) -> int:
        """The least of all ranks' values."""
        self._store.set(f"{subject}/{self._rank}", str(value))
        try:
            return min(int(self._store.get(f"{subject}/{rank}")) for rank in range(self._size))
        except RuntimeError as error:
            raise RankLostError(f"agreeing on {subject}: {str(error).splitlines()[0]}") from error
