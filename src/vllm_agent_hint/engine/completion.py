"""Which of the requests that the front end ends have come to a regular end."""

from collections import Counter


def completed(request_ids: list[str]) -> list[str]:
    """Those that are named twice.

    A stop string is found by the front end, which then aborts the request in the engine. It names
    such a request twice (see ``frontend.stops``); stock takes the ids as a set.
    """
    return [request_id for request_id, times in Counter(request_ids).items() if times > 1]
