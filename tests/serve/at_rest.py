"""What has to hold of a server once everything that it was asked for is over."""

import time
from collections.abc import Callable

from tests.serve.rig import TestServer, tokens

_OURS = "vllm:agent_hint_"
_ALL_GO = (
    "records",
    "leases",
    "sessions",
    "remote_tracked_keys",
    "remote_shared_keys",
    "prefetches_waiting",
    "prefetches_loading",
)


def wait_until(is_so: Callable[[], bool], seconds: float = 15.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it has not come about"
        time.sleep(0.02)


def ours(server: TestServer, name: str, **labels: str) -> float:
    """One of the plugin's metrics, as it is now: an engine that idles reports when it is asked."""
    assert server.get("/v1/agent_hint/sessions").status_code == 200
    return server.metrics().total(_OURS + name, **labels)


def assert_nothing_is_left(server: TestServer) -> None:
    """With the sessions every count goes, and no block is held by anybody."""
    assert server.is_alive()
    wait_until(lambda: not ours(server, "prefetches_loading") + ours(server, "prefetches_waiting"))
    while sessions := server.get("/v1/agent_hint/sessions").json()["sessions"]:
        for session in sessions:
            path = f"/v1/agent_hint/sessions/{session['session_id']}"
            assert server.client.delete(path).status_code == 200
    server.complete(tokens(50, 9_999))

    assert {name: ours(server, name) for name in _ALL_GO} == dict.fromkeys(_ALL_GO, 0.0)
    zones = {zone: ours(server, "blocks", zone=zone) for zone in ("ttl", "session")}
    assert zones == {"ttl": 0.0, "session": 0.0}
    metrics = server.metrics()
    assert metrics.total("vllm:num_requests_running") == 0
    assert metrics.total("vllm:num_requests_waiting") == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0.0, "a block is lost"
    state = server.get("/v1/agent_hint/state").json()
    assert state["active"], state
