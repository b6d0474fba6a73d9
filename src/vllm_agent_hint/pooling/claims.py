"""Who wants what lies in a store."""

from enum import IntEnum


class Claim(IntEnum):
    """Who wants a chunk; those that nobody wants go first, those of a live session last."""

    DEAD = 0
    ORDINARY = 1
    PROTECTED = 2
