"""What a running cluster tells of itself in logs and traces."""

from typing import Literal
from urllib.parse import urlsplit

from .config_section import FilePath, Section


class ObservabilityConfig(Section):
    """Logs and traces."""

    log_format: Literal["text", "json"] = "text"
    """Form of the log lines of ingress and replicas, which go to stderr."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least severity of lines that are logged."""
    request_log: FilePath | None = None
    """File to which a line of JSON is written for each request that has ended, or stderr: id, replica, tokens, times,
    how it ended. Never what was said."""
    otlp_traces_endpoint: str | None = None
    """URL that takes traces by OTLP over HTTP, such as http://collector:4318/v1/traces. Default: OpenTelemetry's
    variables, as OTEL_EXPORTER_OTLP_ENDPOINT; without any there are no traces. Needs the extra otel."""

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and (
            urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc
        ):
            return "otlp_traces_endpoint", f"{endpoint!r} is no http or https URL"
        return None
