"""Every extension point. Offer one through the entry point group ``vllm_agent_hint``.

Hooks are asked when an engine is built, never per request, block or step.
"""

from functools import cache
from typing import Final

import pluggy

from vllm_agent_hint.sessions.policy import ReleasePolicy
from vllm_agent_hint.settings import Settings

PROJECT: Final = "vllm_agent_hint"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """The hooks."""

    @hookspec(firstresult=True)
    def agent_hint_release_policy(self, settings: Settings) -> ReleasePolicy | None:
        """Where released blocks enter the free queue; None leaves it to the next plugin."""


class Defaults:
    """What holds where no other plugin answers."""

    @hookimpl(trylast=True)
    def agent_hint_release_policy(self, settings: Settings) -> ReleasePolicy:
        return ReleasePolicy(expired=settings.expired_enters)


@cache
def plugins() -> pluggy.PluginManager:
    """The plugins of this process: our defaults and what is installed beside us."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    manager.register(Defaults())
    manager.load_setuptools_entrypoints(PROJECT)
    return manager


def release_policy(settings: Settings) -> ReleasePolicy:
    """Ask for the release policy."""
    policy: ReleasePolicy = plugins().hook.agent_hint_release_policy(settings=settings)
    return policy
