"""Reasons that results give in more than one place, in words for a client."""

from typing import Final

NOTHING_RECORDED: Final = "nothing is recorded for this session"
