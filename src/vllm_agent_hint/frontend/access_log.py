"""Session ids stay out of the access log, where our paths would put them."""

import logging
from typing import Final
from urllib.parse import unquote

from vllm_agent_hint.stamp import digest_of

SESSIONS_PATH: Final = "/v1/agent_hint/sessions"


class HideSessionIds(logging.Filter):
    """For uvicorn's access log: a digest in place of the id, and no query, which holds more.

    A record's arguments are client, method, path with query, HTTP version and status.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args
        if isinstance(args, tuple) and len(args) > 2 and isinstance(args[2], str):
            record.args = (*args[:2], without_session_id(args[2]), *args[3:])
        return True


def without_session_id(path: str) -> str:
    """A path as it may be logged. Equal ids have equal digests, on every server of one launch."""
    front, ours, rest = path.partition(SESSIONS_PATH)
    if not ours or not rest:
        return path
    session_id = unquote(rest.partition("?")[0].removeprefix("/"))
    return f"{front}{ours}/{digest_of(session_id)[:12]}" if session_id else f"{front}{ours}"


def hide_session_ids() -> None:
    """Safe to call twice; uvicorn's own set-up replaces handlers and keeps filters."""
    log = logging.getLogger("uvicorn.access")
    if not any(isinstance(known, HideSessionIds) for known in log.filters):
        log.addFilter(HideSessionIds())
