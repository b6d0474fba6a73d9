"""A vLLM plugin for one test: breaks our front end for sessions of certain names."""

from typing import Any

import wrapt


def register() -> None:
    wrapt.when_imported("vllm_agent_hint.frontend.carry")(break_reading)
    wrapt.when_imported("vllm_agent_hint.frontend.reading")(break_reading)
    wrapt.when_imported("vllm_agent_hint.frontend.messages")(break_finding)
    wrapt.when_imported("vllm_agent_hint.frontend.doors")(break_the_report)
    wrapt.when_imported("vllm_agent_hint.frontend.management")(break_the_answer)
    wrapt.when_imported("vllm_agent_hint.frontend.metrics")(break_the_metrics)
    wrapt.when_imported("vllm.v1.engine.core")(break_the_engine)


def break_reading(reader: Any) -> None:
    read = reader.parse_agent_hint

    def broken(value: Any, **more: Any) -> Any:
        if "break-reading" in str(value):
            raise RuntimeError("sabotage")
        return read(value, **more)

    reader.parse_agent_hint = broken


def break_finding(messages: Any) -> None:
    find = messages.find_hint

    def broken(raw: Any, session_id: Any, xargs: Any) -> Any:
        if session_id == "break-finding":
            raise RuntimeError("sabotage")
        return find(raw, session_id, xargs)

    messages.find_hint = broken


def break_the_report(doors: Any) -> None:
    make = doors.CarriedHint.report.fget

    def broken(ours: Any) -> Any:
        if ours.hint.session_id == "break-the-report":
            raise RuntimeError("sabotage")
        return make(ours)

    doors.CarriedHint.report = property(broken)


def break_the_answer(management: Any) -> None:
    run = management._run_edits

    async def broken(serving: Any, request: Any, ours: Any, prompts: Any) -> Any:
        if ours.hint.session_id == "break-the-answer":
            raise RuntimeError("sabotage")
        return await run(serving, request, ours, prompts)

    management._run_edits = broken


def break_the_metrics(metrics: Any) -> None:
    def broken(self: Any, engine: int, stats: Any) -> None:
        raise RuntimeError("sabotage")

    metrics.AgentHintMetrics.take = broken


def break_the_engine(core: Any) -> None:
    # On the subclass, so that it lies over whatever is put on EngineCore, before or after.
    def broken(self: Any, payload: dict[str, Any]) -> Any:
        if payload.get("session_id") == "break-the-engine":
            raise RuntimeError("sabotage")
        return core.EngineCore.agent_hint_rpc(self, payload)

    core.EngineCoreProc.agent_hint_rpc = broken
