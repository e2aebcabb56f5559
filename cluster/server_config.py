"""The HTTP endpoint: where it listens, whom it lets in, what it takes."""

from ipaddress import ip_address
from typing import Literal

from pydantic import Field

from .config_section import Bytes, FilePath, Names, Secrets, Section


class ServerConfig(Section):
    """The HTTP endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(8000, ge=1, le=65535)
    """Port to listen on."""
    api_key: Secrets = ()
    """Keys that open the API, also from WARMROOT_API_KEY (commas between several). Default: open to all."""
    tenant_api_key: Secrets = ()
    """TENANT=KEY: keys of tenants who must not see by response times what others have cached. May be repeated."""
    api_keys_file: FilePath | None = None
    """YAML file of hashed keys with tenants, models and limits, read again when it changes; warmroot keys makes it."""
    admin_api_key: Secrets = ()
    """Keys that open /admin as well, also from WARMROOT_ADMIN_API_KEY. Where there are other keys, only these do."""
    protect_metrics: bool = False
    """Whether /metrics needs a key, too."""
    audit_log: FilePath | None = None
    """File to which each request's key, model, tokens and outcome are written, or stderr. Never what was said."""
    max_body_bytes: Bytes = Field(32 * 1024 * 1024, gt=0)
    """A larger request body gets 413."""
    num_ingress: int = Field(1, ge=1)
    """Copies of the HTTP ingress."""
    root_path: str = ""
    """Path under which a proxy serves the API."""
    prompt_previews: Literal["none", "shared", "all"] = "shared"
    """Whose cached prompts' beginnings admins see in the console: nobody's, those of keys that share, tenants', too."""
    allowed_origins: Names = ("*",)
    """Web pages of these origins may call the API (CORS)."""

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            return "root_path", f"{self.root_path!r} must start with / and must not end with it"
        for name, given in (("api_key", self.api_key), ("admin_api_key", self.admin_api_key)):
            if any(not key.get_secret_value() for key in given):
                return name, "a key must not be empty"
        if not all(tenant and key for key, tenant in self.tenant_keys):
            return "tenant_api_key", "must be of the form TENANT=KEY"
        keys = [key for key, _ in self.all_keys]
        if len(set(keys)) < len(keys):
            return "tenant_api_key", "a key must be of one tenant only"
        if any(key.get_secret_value() in keys for key in self.admin_api_key):
            return "admin_api_key", "must be none of the other keys"
        return None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def tenant_keys(self) -> list[tuple[str, str]]:
        """(key, tenant)."""
        parts = (entry.get_secret_value().partition("=") for entry in self.tenant_api_key)
        return [(key, tenant) for tenant, _, key in parts]

    @property
    def all_keys(self) -> list[tuple[str, str]]:
        """(key, tenant) of all keys; the tenant of those that share is empty."""
        return [(key.get_secret_value(), "") for key in self.api_key] + self.tenant_keys
