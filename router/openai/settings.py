"""How the HTTP API is set up."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from ...cluster.request_limits import RequestLimits


class ApiKey(BaseModel):
    """A key that opens the API, and whose it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    key: SecretStr
    """Compared with ``Authorization: Bearer``."""
    tenant: str = ""
    """Cached prefixes are shared only within a tenant; keys without one share."""


class ApiSettings(BaseModel):
    """Settings of the HTTP API."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    api_keys: tuple[ApiKey, ...] = ()
    """Without any, the API is open."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, gt=0)
    """A larger request body is refused with 413."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Web pages of these origins may call the API (CORS)."""
    sends_request_id: bool = True
    """False where the server in front answers with ``x-request-id`` by itself, as Ray Serve does."""
    root_path: str = ""
    """Path under which a proxy serves the API."""
    keep_alive_s: float = Field(default=15.0, gt=0)
    """A stream that has been silent for so long gets an SSE comment, so that proxies keep it open."""
    api_keys_file: str | None = None
    """More keys, as ``tenancy.key_file`` reads them; with a file the API is closed to all others, even an empty one."""
    admin_keys: tuple[SecretStr, ...] = ()
    """Keys that open ``/admin`` too."""
    open_admin: bool = True
    """Whether ``/admin`` is open where there are no keys at all."""
    protect_metrics: bool = False
    """Whether ``/metrics`` needs a key, too."""
    num_ingress: int = Field(default=1, ge=1)
    """Ingresses that share the limits of a key."""
    ingress: str = ""
    """Name of this one in metrics, where there are several."""
    audit_log: str | None = None
    """File of the audit log, or ``stderr``; None: there is none."""
    request_log: str | None = None
    """File of the request log, or ``stderr``; None: there is none."""
    prompt_previews: Literal["none", "shared", "all"] = "shared"
    """Whose prompts' beginnings ``/admin/state`` shows."""
    limits: RequestLimits = Field(default_factory=lambda: RequestLimits.model_validate({}))
    """What a single request may ask for."""
    waits_for_replicas: bool = False
    """Whether a request that comes while there is no replica makes one start: then it is no fault to have none."""
    served_names: tuple[str, ...] = ()
    """Names of models that are to be served: one that is not up yet answers 503, and an unknown one 404."""
