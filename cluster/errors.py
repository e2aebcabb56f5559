"""Every error a user can meet.

WarmrootError
├── ClientError            the caller can mend it
│   ├── InvalidRequestError        400
│   │   └── ContextTooLongError    400  context_length_exceeded
│   ├── AuthenticationError        401
│   ├── PermissionDeniedError      403
│   ├── ModelNotFoundError         404
│   ├── PayloadTooLargeError       413
│   ├── HeadersTooLargeError       431
│   ├── OverloadedError            429  with retry_after seconds
│   │   └── RateLimitError             429  a key's or tenant's own limit
│   └── ConfigError                     bad flag or configuration key
└── ServerError            the cluster failed
    ├── ModelLoadError
    ├── ReplicaUnavailableError    503
    │   ├── RankLostError          503  rank_lost
    │   └── ReplicaLostError       503  replica_lost
    ├── PoisonRequestError         500  poison_request
    ├── DeadlineExceededError      504
    ├── WeightsUpdateError         500  weights_update_failed
    └── EngineError                500
"""

from typing import ClassVar


class WarmrootError(Exception):
    """Root of the tree. ``status``, ``type`` and ``code`` follow OpenAI's error bodies."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body ``{"error": {message, type, param, code}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class ClientError(WarmrootError):
    """The caller can mend it."""

    status = 400
    type = "invalid_request_error"


class InvalidRequestError(ClientError):
    """A field has a value that cannot be served; ``param`` names it."""


class ContextTooLongError(InvalidRequestError):
    """Prompt and requested output exceed the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(ClientError):
    """Missing or wrong API key."""

    status = 401
    code = "invalid_api_key"


class PermissionDeniedError(ClientError):
    """The API key is good, but not for this."""

    status = 403
    code = "permission_denied"


class ModelNotFoundError(ClientError):
    """No model of that name is served here."""

    status = 404
    code = "model_not_found"


class PayloadTooLargeError(ClientError):
    """The request body exceeds the limit."""

    status = 413
    code = "payload_too_large"


class HeadersTooLargeError(ClientError):
    """The request's headers exceed the limit."""

    status = 431
    code = "headers_too_large"


class OverloadedError(ClientError):
    """The bounded queue is full; try again after ``retry_after`` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class RateLimitError(OverloadedError):
    """The key, or its tenant, has used what it has per minute; try again after ``retry_after`` seconds."""


class ConfigError(ClientError):
    """A flag or configuration key is wrong; ``param`` is its path."""


class ServerError(WarmrootError):
    """The cluster failed."""


class ModelLoadError(ServerError):
    """Weights, tokenizer or architecture cannot be loaded; the message names file and tensor."""


class ReplicaUnavailableError(ServerError):
    """No replica can take the request now."""

    status = 503
    type = "service_unavailable"
    code = "replica_unavailable"


class RankLostError(ReplicaUnavailableError):
    """A process of a gang has died, hangs, or is cut off; the message names it and what was waited for."""

    code = "rank_lost"


class ReplicaLostError(ReplicaUnavailableError):
    """The replica had accepted the request and cannot go on with it; another one can.

    ``reason``: ``connection``, ``silence``, ``engine`` (it has failed) or ``draining`` (it stops, and hands it back).
    """

    code = "replica_lost"

    def __init__(self, message: str, *, reason: str = "connection", param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.reason = reason


class PoisonRequestError(ServerError):
    """The request was running on several replicas as they died, and is not tried on another one."""

    code = "poison_request"


class DeadlineExceededError(ServerError):
    """The request's deadline passed."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class WeightsUpdateError(ServerError):
    """Some replicas have new weights and others could not change; the message says who holds what."""

    code = "weights_update_failed"


class EngineError(ServerError):
    """The engine failed while it served the request."""

    code = "engine_error"
