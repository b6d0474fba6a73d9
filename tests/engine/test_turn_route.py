"""``POST /v1/agent_hint/sessions/{id}/turn`` over real schedulers: every engine of a server."""

from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.engine.rig import Engine, hinted
from tests.engine.test_policy import CALLS, make_engine, tell
from vllm_agent_hint.engine.utility import agent_hint_rpc
from vllm_agent_hint.frontend.routes import router

URL = "/v1/agent_hint/sessions/calls/turn"
TOLD = {"ended": "tool_call", "tools": ["bash"]}


def client_of(*engines: Engine | None) -> TestClient:
    """A server of data-parallel engines; None is one that can't answer."""

    async def call(method: str, payload: dict[str, Any], *, engine: bytes) -> Any:
        asked = engines[int.from_bytes(engine, "little")]
        if asked is None:
            raise TimeoutError
        return agent_hint_rpc(SimpleNamespace(scheduler=asked.scheduler), payload)

    core = SimpleNamespace(
        core_engines=[k.to_bytes(2, "little") for k in range(len(engines))],
        _call_utility_async=call,
    )
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = SimpleNamespace(engine_core=core, logger_manager=None)
    return TestClient(app)


@pytest.fixture
def engine() -> Engine:
    engine = make_engine()
    engine.serve(CALLS, hint=hinted("calls", 300.0))
    return engine


def test_what_a_client_says_of_a_turn_is_told_as_its_own_word(engine: Engine) -> None:
    response = client_of(engine).post(URL, json=TOLD)
    assert response.json() == {"session_id": "calls", "used": True}
    assert not tell(engine, "calls", "final_message"), "what a front end has seen comes too late"
    turn = engine.session("calls").turn
    assert (turn.ended, turn.tool) == ("tool_call", "bash")


def test_every_engine_is_told_and_one_that_has_use_for_it_is_enough(engine: Engine) -> None:
    other = make_engine()
    assert client_of(other, engine).post(URL, json=TOLD).json()["used"] is True
    assert engine.session("calls").turn.ended == "tool_call"
    assert client_of(other, other).post(URL, json=TOLD).json()["used"] is False


def test_an_engine_that_can_not_answer_may_have_the_session(engine: Engine) -> None:
    assert client_of(None, engine).post(URL, json=TOLD).json()["used"] is True
    response = client_of(None, make_engine()).post(URL, json=TOLD)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "ServiceUnavailableError"


def test_a_server_on_which_hints_have_no_effect_has_no_use_for_it() -> None:
    inactive = make_engine(enable_caching=False)
    assert client_of(inactive).post(URL, json=TOLD).json()["used"] is False
