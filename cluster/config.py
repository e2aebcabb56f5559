"""Configuration: one class per concern, one flat set of keys.

A key is a field of one section, unique over all of them; the command line, YAML files and the documentation are made
from the fields here. Flag names follow vLLM where the meaning is the same.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo

from .autoscaling_config import AutoscalingConfig
from .config_errors import explain_invalid, unknown_key
from .config_section import Bytes, Names, Section
from .errors import ConfigError
from .metadata_store import EMBEDDED, parse_store
from .observability_config import ObservabilityConfig
from .overload import OverloadConfig
from .request_limits import RequestLimits
from .server_config import ServerConfig
from .speculative_config import SpeculativeConfig, read_speculative_config
from .time_limits import TimeLimits
from .tls_config import TlsConfig
from .topology import Topology

RoutingPolicyName = Literal[
    "warm_prefix",
    "round_robin",
    "random",
    "power_of_two",
    "least_loaded",
    "session_affinity",
    "sglang",
    "ray",
    "ray10",
    "dynamo",
    "dynamo10",
    "dynamo_wspt",
    "llmd_precise",
    "llmd_base",
    "llmd_active",
    "aibrix",
    "preble",
    "gorgo",
    "consistent_hash",
]
DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
QuantizationName = Literal["auto", "none", "int8", "int4", "int4-g64", "int4-g128", "gptq", "awq"]
ToolParserName = Literal["auto", "hermes", "llama3_json"]
KvDtypeName = Literal["auto", "fp32", "fp16", "bf16", "fp8", "int8", "int4", "k8v4"]


class ModelConfig(Section):
    """The model and its tokenizer."""

    model: str = Field(min_length=1)
    """Hugging Face folder, GGUF file, hub id, or smollm2 for the packaged SmolLM2-135M-Instruct."""
    served_model_name: Names = ()
    """Names under which the API serves the model. Default: MODEL as given."""
    tokenizer: str | None = None
    """Folder, GGUF file or hub id of the tokenizer. Default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    weights_version: str | None = Field(None, pattern=r"^[A-Za-z0-9._:+-]{1,64}$")
    """Name of the weights: cached keys and values are used only with the version that made them. Default: a fingerprint
    of the checkpoint's files."""
    dtype: DtypeName = "auto"
    """Type of weights and activations. auto: the one that suits checkpoint and device."""
    quantization: QuantizationName = "auto"
    """Form of the weights. auto: the checkpoint's; none: dequantised to dtype; int8, int4: every linear in 8 or 4 bits
    with a scale per 32 inputs (int4-g64, int4-g128: per 64 or 128); gptq, awq: the checkpoint's, which must be that."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence, prompt and output, in tokens. Default: the model's context, or what the KV memory holds."""
    chat_template: str | None = None
    """File with a Jinja chat template, or the template itself. Default: the tokenizer's."""
    tool_call_parser: ToolParserName = "auto"
    """How the model writes tool calls. auto: as its chat template says, hermes where it says nothing."""
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Base of the seeds of requests that bring none, for repeatable runs. Default: random."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in the API, the first one being canonical."""
        return self.served_model_name or (self.model,)


class CacheConfig(Section):
    """KV memory of each replica and the prefix cache in it."""

    block_size: int = Field(16, ge=1, le=256)
    """Tokens per KV block."""
    kv_cache_dtype: KvDtypeName = "auto"
    """Form of cached keys and values; fp8: e4m3; k8v4: keys int8, values int4. auto: 16 bits, or fp32 for dtype
    float32 or without kernels that read 16 bits."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that a replica may use for weights and KV."""
    kv_cache_memory: Bytes | None = Field(None, gt=0)
    """KV memory per replica, such as 2GiB. Default: what gpu_memory_utilization leaves, or a share of free RAM."""
    num_kv_blocks: int | None = Field(None, ge=2)
    """KV blocks per replica, instead of an amount of memory."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished requests and reuse it for equal prefixes."""

    @field_validator("kv_cache_dtype", mode="before")
    @classmethod
    def _fp8_is_e4m3(cls, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("fp8_"):
            if value != "fp8_e4m3":
                raise ValueError(f"{value} is not supported; fp8 is e4m3, and int8 is about as small")
            return "fp8"
        return value

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            return "num_kv_blocks", "give either num_kv_blocks or kv_cache_memory, not both"
        return None


class ParallelConfig(Section):
    """How a replica is cut over ranks."""

    tensor_parallel_size: int = Field(1, ge=1)
    """Ranks that share the work of every layer, all on one node."""
    pipeline_parallel_size: int = Field(1, ge=1)
    """Stages of layers, spread over nodes where there are several."""
    enable_expert_parallel: bool = False
    """Spread a mixture's experts over ranks, instead of cutting each of them."""
    expert_parallel_size: int | None = Field(None, ge=1)
    """Ranks that share the experts; more than tensor_parallel_size serve requests apart. Default: as many."""
    num_redundant_experts: int = Field(0, ge=0)
    """Copies of busy experts in every layer, beside the experts themselves."""
    expert_balance_steps: int = Field(16, ge=0)
    """Steps after which the next layer's experts move to where the load is less; 0: they stay where they are."""
    step_timeout: float = Field(60.0, gt=0)
    """Seconds after which a step that does not end counts as hung, and its ranks are replaced."""

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if not self.enable_expert_parallel:
            if self.expert_parallel_size is not None:
                return "expert_parallel_size", "needs enable_expert_parallel"
            if self.num_redundant_experts:
                return "num_redundant_experts", "needs enable_expert_parallel"
        try:
            self.topology()
        except ConfigError as error:
            return error.param or "tensor_parallel_size", error.message.partition(": ")[2]
        return None

    def topology(self) -> Topology:
        """The groups of a replica's ranks."""
        ep = (self.expert_parallel_size or self.tensor_parallel_size) if self.enable_expert_parallel else 1
        return Topology(tp=self.tensor_parallel_size, pp=self.pipeline_parallel_size, ep=ep)


class SchedulerConfig(Section):
    """Limits of a replica's continuous batching."""

    max_num_seqs: int = Field(256, ge=1)
    """Sequences that run at the same time."""
    max_num_batched_tokens: int = Field(2048, ge=1)
    """Tokens computed in one step."""
    max_prefill_chunk: int | None = Field(None, ge=1)
    """Prompt tokens computed in one step while others decode. Default: what takes a quarter of a second."""
    max_num_queued_reqs: int = Field(1024, ge=1)
    """Waiting requests per replica beyond which new ones get 429."""

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            return (
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs}):"
                " a step must have room for one token of every sequence",
            )
        return None


class SpeculationConfig(Section):
    """Tokens drafted ahead of the model."""

    speculative_config: Annotated[SpeculativeConfig, BeforeValidator(read_speculative_config)] | None = None
    """Speculative decoding, as '{"method": "ngram", "num_speculative_tokens": 4}' or a mapping. Default: off."""


class RoutingConfig(Section):
    """How a request finds its replica."""

    routing_policy: RoutingPolicyName = "warm_prefix"
    """warm_prefix weighs the cached prefix against the load; the others are for comparison."""
    late_binding_backlog: float = Field(0.4, ge=0)
    """Seconds of prefill in front of a request above which it waits in the router for the replica to become free."""
    max_replica_losses: int = Field(3, ge=1)
    """A request that was running on so many replicas as they were lost may be the cause: it fails, and ends there."""
    record_trace: str | None = None
    """File to which the ingress appends arrivals, lengths and hashed prefixes, for warmroot simulate. No text."""


class DeployConfig(Section):
    """Replicas and the Ray cluster that they live in."""

    num_replicas: int = Field(1, ge=1)
    """Copies of the model, each with its own KV cache. With max_replicas their number follows the work instead."""
    threads_per_replica: int | None = Field(None, ge=1)
    """CPU threads that compute in each replica. Default: the machine's cores shared among its replicas."""
    device: DeviceName = "auto"
    """What computes: cuda asks for a GPU for each rank, even where no node has one yet. auto: GPUs where there are."""
    accelerator_type: str | None = None
    """Only nodes with this accelerator host replicas; Ray's name of it, such as H100 or A10G."""
    node_labels: Names = ()
    """Only nodes with these labels host replicas: name=value, as Ray's nodes are labelled."""
    ray_address: str | None = None
    """Ray cluster to join, or auto. Default: start Ray on this machine."""
    num_cpus: float | None = Field(None, gt=0)
    """CPUs that Ray started here may hand out. Default: the machine's, or more if the replicas need them."""
    metadata_store: SecretStr | None = None
    """What routers share is kept here: redis://, rediss:// or redis+sentinel:// URL, or embedded, the default.
    A password may come from WARMROOT_REDIS_PASSWORD instead.
    """

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if self.ray_address is not None and self.num_cpus is not None:
            return "num_cpus", "applies to a Ray started here; leave it away with ray_address"
        for label in self.node_labels:
            name, equals, value = label.partition("=")
            if not (name and equals and value):
                return "node_labels", f"{label!r} is not of the form name=value"
        try:
            parse_store(EMBEDDED if self.metadata_store is None else self.metadata_store.get_secret_value())
        except ValueError as error:
            return "metadata_store", str(error)
        return None

    @property
    def label_selector(self) -> dict[str, str]:
        """What nodes that host replicas must be labelled with, by name."""
        labels = dict(label.split("=", 1) for label in self.node_labels)
        if self.accelerator_type is not None:
            labels["ray.io/accelerator-type"] = self.accelerator_type
        return labels


class WarmrootConfig(Section):
    """All of it. Made by ``of`` or ``from_keys``, from flat keys."""

    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    speculation: SpeculationConfig
    routing: RoutingConfig
    overload: OverloadConfig
    server: ServerConfig
    tls: TlsConfig
    limits: TimeLimits
    requests: RequestLimits
    observability: ObservabilityConfig
    deploy: DeployConfig
    autoscaling: AutoscalingConfig

    SECTIONS: ClassVar[Mapping[str, type[Section]]] = {
        "model": ModelConfig,
        "parallel": ParallelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "speculation": SpeculationConfig,
        "routing": RoutingConfig,
        "overload": OverloadConfig,
        "server": ServerConfig,
        "tls": TlsConfig,
        "limits": TimeLimits,
        "requests": RequestLimits,
        "observability": ObservabilityConfig,
        "deploy": DeployConfig,
        "autoscaling": AutoscalingConfig,
    }

    @property
    def first_replicas(self) -> int:
        """Copies of the model that are started with the application."""
        scaling = self.autoscaling
        return self.deploy.num_replicas if scaling.max_replicas is None else scaling.min_replicas

    @property
    def most_replicas(self) -> int:
        """Copies of the model that there may be."""
        return self.autoscaling.max_replicas or self.deploy.num_replicas

    @classmethod
    def keys(cls) -> dict[str, FieldInfo]:
        """Every key with its type, default, bounds and description."""
        return {key: info for section in cls.SECTIONS.values() for key, info in section.model_fields.items()}

    @classmethod
    def of(cls, model: str, **keys: Any) -> "WarmrootConfig":
        """From Python: ``WarmrootConfig.of("smollm2", num_replicas=2)``. Raises ConfigError."""
        return cls.from_keys({"model": model, **keys})

    @classmethod
    def from_keys(cls, values: Mapping[str, Any], where: Callable[[str], str] = lambda key: key) -> "WarmrootConfig":
        """Validate flat keys; ``where`` names a key in messages (a flag, a line of a file). Raises ConfigError."""
        known = cls.keys()
        for key in values:
            if key not in known:
                raise ConfigError(unknown_key(where(key), key, known), param=key)
        if "model" not in values:
            raise ConfigError("model: missing; name a folder, GGUF file, hub id or smollm2", param="model")
        sections = {
            name: _section(section, {key: values[key] for key in section.model_fields if key in values}, where)
            for name, section in cls.SECTIONS.items()
        }
        return cls.model_validate(sections)


SECRET_KEYS = frozenset(key for key, info in WarmrootConfig.keys().items() if "SecretStr" in repr(info.annotation))
"""Keys with something secret: no message shows their values. ``metadata_store`` is one only with a password in it."""


def _section(kind: type[Section], values: dict[str, Any], where: Callable[[str], str]) -> Section:
    try:
        section = kind.model_validate(values)
    except ValidationError as error:
        key, message = explain_invalid(error, secret=SECRET_KEYS)
        raise ConfigError(f"{where(key)}: {message}", param=key) from None
    problem = section.problem()
    if problem is not None:
        raise ConfigError(f"{where(problem[0])}: {problem[1]}", param=problem[0])
    return section
