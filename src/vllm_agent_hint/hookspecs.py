"""Every extension point. Offer one through the entry point group ``vllm_agent_hint``.

Hooks are asked when an engine is built, never per request, block or step.
"""

from functools import cache
from typing import Final

import pluggy

from vllm_agent_hint.sessions.policy import RetentionPolicy, policy_of
from vllm_agent_hint.settings import Settings

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


class Defaults:
    """What holds where no other plugin answers."""

    @hookimpl(trylast=True)
    def agent_hint_retention_policy(self, settings: Settings) -> RetentionPolicy:
        return policy_of(settings)


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
