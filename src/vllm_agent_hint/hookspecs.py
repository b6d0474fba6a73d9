"""Every extension point. Offer one through the entry point group ``vllm_agent_hint``.

Hooks are asked when an engine is built, never per request, block or step.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pluggy

from vllm_agent_hint.sessions.policy import RetentionPolicy, policy_of
from vllm_agent_hint.settings import Settings

if TYPE_CHECKING:
    from vllm_agent_hint.pooling.capability import SupportsSessionAwareKVManagement
    from vllm_agent_hint.pooling.store import Store

PROJECT: Final = "vllm_agent_hint"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """The hooks."""

    @hookspec(firstresult=True)
    def agent_hint_retention_policy(self, settings: Settings) -> RetentionPolicy | None:
        """Who gives way first, what is protected, and where released blocks enter the free queue.

        Asked for each engine, which gets an object of its own; None leaves it to the next plugin.
        """

    @hookspec(firstresult=True)
    def agent_hint_kv_management(
        self, connector: Any, settings: Settings
    ) -> "SupportsSessionAwareKVManagement | None":
        """Session-aware management by a KV connector itself; None leaves it to the next plugin."""

    @hookspec(firstresult=True)
    def agent_hint_kv_store(self, scheduler: Any, connector: Any) -> "Store | None":
        """An adapter through which ours manages a KV connector that has no management itself."""


class Defaults:
    """What holds where no other plugin answers."""

    @hookimpl(trylast=True)
    def agent_hint_retention_policy(self, settings: Settings) -> RetentionPolicy:
        return policy_of(settings)

    @hookimpl(trylast=True)
    def agent_hint_kv_management(
        self, connector: Any, settings: Settings
    ) -> "SupportsSessionAwareKVManagement | None":
        from vllm_agent_hint.pooling.capability import SupportsSessionAwareKVManagement

        return connector if isinstance(connector, SupportsSessionAwareKVManagement) else None

    @hookimpl(trylast=True)
    def agent_hint_kv_store(self, scheduler: Any, connector: Any) -> "Store | None":
        from vllm_agent_hint.pooling.adapters import store_for

        return store_for(scheduler, connector)


@cache
def plugins() -> pluggy.PluginManager:
    """The plugins of this process: our defaults and what is installed beside us."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    manager.register(Defaults())
    manager.load_setuptools_entrypoints(PROJECT)
    return manager


def retention_policy(settings: Settings) -> RetentionPolicy:
    """Ask for the retention policy."""
    policy: RetentionPolicy = plugins().hook.agent_hint_retention_policy(settings=settings)
    return policy


def kv_management(connector: Any, settings: Settings) -> "SupportsSessionAwareKVManagement | None":
    """Ask who manages a connector's content by session."""
    found: SupportsSessionAwareKVManagement | None = plugins().hook.agent_hint_kv_management(
        connector=connector, settings=settings
    )
    return found


def kv_store(scheduler: Any, connector: Any) -> "Store | None":
    """Ask for an adapter to a connector."""
    found: Store | None = plugins().hook.agent_hint_kv_store(
        scheduler=scheduler, connector=connector
    )
    return found
