"""How a service's processes log: lines of text for people, or JSON objects, one a line, for collectors."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType

FORMAT_VARIABLE = "REDRAFT_LOG_FORMAT"
"""Environment variable with a `LogFormat`; a service's processes inherit it."""
LINES = "%(asctime)s %(levelname)s %(message)s"


class LogFormat(StrEnum):
    text = "text"
    json = "json"


class JsonLines(logging.Formatter):
    """A record as one JSON object: time (UTC), level, logger, process id, message, the record's `fields` where it has
    some, and an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def configure(text: str = LINES, level: int = logging.INFO, handlers: Iterable[logging.Handler] | None = None) -> None:
    """Set this process's logging up: to standard error unless `handlers` are given, as the environment asks. `text` is
    the format of text lines. As JSON, exceptions that end the process are logged too."""
    logging.basicConfig(level=level, format=text, handlers=handlers, force=True)
    if os.environ.get(FORMAT_VARIABLE) == LogFormat.json:
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
        sys.excepthook = _log_uncaught


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("redraft").critical("%s ended the process", kind.__name__, exc_info=(kind, error, trace))
