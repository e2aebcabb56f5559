"""How long anything may take: connections, waiting, generating, starting, stopping."""

from pydantic import Field

from .config_section import Section


class TimeLimits(Section):
    """Time limits, in seconds."""

    connect_timeout: float = Field(5.0, gt=0)
    """Connecting to a replica, its greeting included; it is tried again with a backoff."""
    no_replica_timeout: float = Field(60.0, gt=0)
    """While no replica is ready a request waits so long, then it gets 503. With min_replicas 0 and without a value of
    its own: as long as a replica may take to start."""
    queue_timeout: float = Field(300.0, ge=0)
    """A request that waits so long for a replica, or in its queue, gets 504; 0: for ever."""
    first_token_timeout: float = Field(600.0, ge=0)
    """From the arrival of a request to its first token, then it gets 504; 0: for ever."""
    idle_stream_timeout: float = Field(300.0, ge=0)
    """Between two tokens of a request that has begun, then it ends with deadline_exceeded; 0: for ever."""
    request_timeout: float = Field(0.0, ge=0)
    """From a request's arrival to its end, unless it brings a deadline of its own; 0: for ever."""
    keep_alive_interval: float = Field(15.0, gt=0)
    """A stream that is silent for so long gets an SSE comment, so that proxies keep it open."""
    shutdown_grace: float = Field(20.0, gt=0)
    """What open requests get when a replica, an ingress or all of it stops."""
    replica_start_timeout: float = Field(1800.0, gt=0)
    """Loading a model and warming it up; a replica that takes longer has failed."""

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if 0 < self.first_token_timeout < self.queue_timeout:
            return "first_token_timeout", f"{self.first_token_timeout:g} is less than queue_timeout, a part of it"
        return None
