"""The scheduler mixin: reports requests at the boundaries that vLLM has anyway."""

import sys
from functools import cache
from types import new_class
from typing import Any

from vllm_agent_hint.engine.hooks import EngineHooks
from vllm_agent_hint.engine.scheduler_stats import FIELD
from vllm_agent_hint.kvcache.manager import agent_kv_cache_manager
from vllm_agent_hint.kvcache.rebinding import rebound


class AgentSchedulerMixin:
    """Laid over whatever scheduler class vLLM would have used.

    Every override calls ``super()`` exactly once and passes on what it got. All that is ours is
    in the one attribute ``agent_hint``: the class below may be a user's, with names of its own.
    """

    agent_hint: EngineHooks
    kv_cache_manager: Any
    parallel_config: Any
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        modules = [sys.modules.get(c.__module__) for c in type(self).__mro__]
        with rebound(filter(None, modules), "KVCacheManager", agent_kv_cache_manager):
            super().__init__(*args, **kwargs)
        self.agent_hint = EngineHooks(
            getattr(self, "kv_cache_manager", None), getattr(self, "parallel_config", None)
        )
        if getattr(self, "connector", None) is not None:
            self.agent_hint.attach_connector(self)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """As stock, without the hint; then act on it, once.

        An id that is known belongs to a streaming-input request, whose last chunk ends it.
        """
        is_known = request.request_id in self.requests
        if is_known and not getattr(request, "resumable", False):
            self.agent_hint.request_complete(request.request_id)
        arrived = self.agent_hint.take_hint(request)
        super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        traffic = self.agent_hint.traffic
        if traffic is not None and not is_known and not self.agent_hint.is_load(request):
            traffic.request_added(request, arrived)
        if is_known:
            return
        if arrived is not None:
            self.agent_hint.request_added(request, arrived)
        elif self.agent_hint.recognizes:
            self.agent_hint.unhinted_added(request)

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """As stock, after noting which of the requests are complete."""
        if self.agent_hint.tracked and isinstance(request_ids, list):
            self.agent_hint.requests_complete(request_ids)
        traffic = self.agent_hint.traffic
        if traffic is not None and isinstance(request_ids, list):
            traffic.requests_complete(request_ids)
        return super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Record what a request has computed before its blocks go."""
        if request.request_id in self.agent_hint.tracked:
            self.agent_hint.request_preempted(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a request's context while it still holds its blocks; then its edits run.

        A connector may keep the blocks for longer. The edits don't wait for it, so that they run
        before the session's next turn is recorded.
        """
        traffic = self.agent_hint.traffic
        if traffic is not None:
            traffic.request_ended(request)
        tracked = self.agent_hint.tracked.get(request.request_id)
        if self.agent_hint.remote is not None:
            self.agent_hint.remote.request_ends(request)
        if tracked is None:
            return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.agent_hint.request_ended(request)
        result = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        self.agent_hint.run_edits(request, tracked)
        return result

    def _free_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """As stock, at once or after a transfer."""
        super()._free_blocks(request, *args, **kwargs)  # type: ignore[misc]
        self.agent_hint.tracked.pop(request.request_id, None)
        if self.agent_hint.remote is not None:
            self.agent_hint.remote.request_freed(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, after expiring what is due. On the path of every step."""
        self.agent_hint.expire_due()
        remote = self.agent_hint.remote
        if remote is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        remote.before_schedule()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        remote.after_schedule()
        return output

    def has_requests(self) -> bool:
        """As stock, or something of ours goes on with each step: letting go, transfers."""
        if self.agent_hint.remote is not None:
            self.agent_hint.remote.look()
        return super().has_requests() or self.agent_hint.wants_steps  # type: ignore[misc]

    def set_pause_state(self, pause_state: Any, *args: Any, **kwargs: Any) -> None:
        """As stock; from here on no step is wanted, since the executor may be asleep."""
        if self.agent_hint.remote is not None:
            self.agent_hint.remote.pause_changed(is_paused=bool(pause_state))
        super().set_pause_state(pause_state, *args, **kwargs)  # type: ignore[misc]
        self.agent_hint.pause_changed(is_paused=bool(pause_state))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        """As stock, after giving up loads.

        Stock raises where a block is still held that it thinks it has taken from everybody. A
        load that the connector is still writing is none of its business: then the reset has
        failed, as it does beside any request that runs.
        """
        remote = self.agent_hint.remote
        if remote is None:
            return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)  # type: ignore[misc]
        remote.about_to_reset()
        try:
            return super().reset_prefix_cache(reset_running_requests, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError:
            if not remote.loads.num_loading:
                raise
            return False

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """As stock, with our part in the field that ``scheduler_stats`` has added."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if self.agent_hint.has_news and stats is not None and hasattr(stats, FIELD):
            self.agent_hint.report(stats)
        return stats


@cache
def agent_scheduler(base: type) -> type:
    """``base`` with the mixin laid over it."""
    return new_class("AgentHint" + base.__name__, (AgentSchedulerMixin, base))
