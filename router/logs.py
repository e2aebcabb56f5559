"""Log lines of a process of the cluster: as text, or as JSON, one object a line."""

import json
import logging
import sys
import time

from ..cluster.observability_config import ObservabilityConfig

PACKAGE = __name__.partition(".")[0]
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A line of JSON: time, level, logger, message, and where there are some ``request_id`` and the exception."""

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(config: ObservabilityConfig) -> None:
    """Let this package log to stderr as configured. Again, the new configuration holds."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else logging.Formatter(TEXT))
    logger = logging.getLogger(PACKAGE)
    logger.setLevel(config.log_level.upper())
    logger.handlers[:] = [handler]
    logger.propagate = False
