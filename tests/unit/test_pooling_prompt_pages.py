"""The pages of a manifest in a Mooncake store that is slow, silent or gone.

The store itself is a real one in ``tests/serve/test_pooling_mooncake_manifest.py``.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vllm_agent_hint.pooling.adapters.mooncake_pages import MooncakePages
from vllm_agent_hint.pooling.capability import Content
from vllm_agent_hint.pooling.manifest import SessionManifest
from vllm_agent_hint.sessions.intent import SessionKey

KEY = SessionKey("", None, "a")


class SlowClient:
    """A client that answers when it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked = 0

    def get(self, key: str) -> bytes:
        self.asked += 1
        self.may_answer.wait(10)
        return b"page"

    def is_exist(self, key: str) -> int:
        return int(bool(self.get(key)))


class BrokenClient:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise RuntimeError("gone")

        return fail


def test_the_scheduler_waits_for_an_answer_for_a_bounded_time_and_then_asks_no_more() -> None:
    client, now = SlowClient(), [0.0]
    pages = MooncakePages("prefix", lambda: client, lambda: now[0])
    began = time.monotonic()
    assert not pages.holds("page")
    assert time.monotonic() - began < 2.0
    for _ in range(100):
        assert not pages.holds("page")
        with pytest.raises(OSError, match="did not answer"):
            pages.get("page")
    assert time.monotonic() - began < 2.0
    assert client.asked == 1
    client.may_answer.set()
    now[0] += 11.0
    assert pages.holds("page")
    assert pages.get("page") == b"page"


@pytest.mark.parametrize("opened", [BrokenClient, lambda: 1 / 0], ids=["broken", "none"])
def test_a_store_that_can_not_be_asked_has_no_pages_and_harms_nobody(
    opened: Callable[[], Any],
) -> None:
    manifest = SessionManifest(MooncakePages("prefix", opened), lambda: "scheme")
    manifest.write(KEY, [Content([b"1"], 16)], ttl=60.0)
    manifest.finish()
    assert manifest.read(KEY) is None
    assert not manifest.holds(KEY)
    manifest.forget(KEY)
    manifest.finish()
    assert manifest.read(KEY) is None
