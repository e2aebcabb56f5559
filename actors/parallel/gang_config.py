"""What a gang runs, where its ranks meet, and what each of them reports once it is ready."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...cluster.expert_balance import ExpertBalance
from ...cluster.kv_layout import KvLayout
from ...cluster.parallel_layout import ParallelLayout
from ...cluster.speculative_config import SpeculativeConfig
from ...cluster.topology import Topology
from ..models.spec import read_layout
from ..runner.load import KvMemoryConfig
from .traffic import Kind

StoreAddress = tuple[str, int]
"""Host and port of the store that rank 0 serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangConfig:
    """The same for all ranks; ``path`` is there on every machine."""

    path: Path
    topology: Topology
    kv: KvMemoryConfig
    threads_per_rank: int
    dtype: str = "auto"
    quantization: str = "auto"
    num_redundant_experts: int = 0
    expert_balance_steps: int = 16
    """After so many steps the next layer's experts are placed anew by what was asked of them; 0: they stay."""
    max_model_len: int | None = None
    max_num_seqs: int = 256
    speculation: SpeculativeConfig | None = None
    draft_path: Path | None = None
    """The model that drafts, or the folder of Medusa heads, if that is what ``speculation`` asks for."""
    tokenizer: Path | None = None
    """Where it is not the model's own: what grammars are compiled for."""
    start_s: float = 600.0
    """Seconds that loading may take."""
    step_s: float = 30.0
    """Deadline of a step, and of every operation between the ranks."""

    def layout(self) -> ParallelLayout:
        """What each rank holds. Raises ModelLoadError, and ConfigError for a model that cannot be cut so."""
        return read_layout(
            self.path,
            self.topology,
            quantization=self.quantization,
            num_redundant_experts=self.num_redundant_experts,
        )


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks find each other and their leader."""

    store: StoreAddress
    leader: tuple[str, ...]
    """Addresses of the control plane, best first."""
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank that is ready for plans."""

    rank: int
    host: str
    pid: int
    peak_memory_bytes: int
    """Most that its process has held, at least all of its weights, its KV pages and what it has besides."""
    layout: KvLayout
    """Of the whole model: what the leader's block tables are made for."""
    num_blocks: int
    kv_dtype: str
    weights_format: str
    kernels: str
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What a rank has spent its time on since it was ready, in seconds."""

    rank: int
    num_steps: int
    idle_s: float
    """Without a plan."""
    bubble_s: float
    """With a plan, but waiting for the stage before."""
    busy_s: float
    """In its own layers, sums with its tensor-parallel peers included."""
    communication_s: float = 0.0
    """Of that, in operations with other ranks: sums, gathers, exchanges of tokens, hidden states handed on."""
    control_s: float = 0.0
    """Taking in plans and answering."""
    cpu_s: float = 0.0
    """Processor time of the whole process, since it started."""
    num_bytes: Mapping[Kind, int] = field(default_factory=dict[Kind, int])
    """Payload that it has put into each kind of operation."""
    num_calls: Mapping[Kind, int] = field(default_factory=dict[Kind, int])
    expert_rows: int = 0
    """Rows that its experts have computed, in all layers: a token has one for each of its experts that is here."""
    experts: tuple[ExpertBalance, ...] = ()
    """Of the sparse layers that its stage has looked at; only the stage's first rank says so."""
