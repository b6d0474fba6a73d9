"""The example of docs/policy.md is a plugin that works, and the page says what the code says."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.engine.rig import hinted
from tests.engine.test_policy import CALLS, DONE, lost, make_engine, press, tell
from vllm_agent_hint.hookspecs import plugins
from vllm_agent_hint.kvcache import queue
from vllm_agent_hint.sessions import reuse
from vllm_agent_hint.settings import GiveWay

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policy.md"


def test_the_example_is_a_plugin_that_works() -> None:
    found = re.search(
        r"<!-- example -->\n```python\n(.*?)```\n<!-- end -->", PAGE.read_text(), re.S
    )
    assert found is not None
    module = ModuleType("night_shift")
    exec(compile(found[1], str(PAGE), "exec"), module.__dict__)
    plugins().register(module)
    try:
        engine = make_engine()
    finally:
        plugins().unregister(module)
    for name, tokens, tool in (("machine", CALLS, "bash"), ("human", DONE, "ask_user")):
        engine.serve(tokens, hint=hinted(name, 300.0))
        assert tell(engine, name, "tool_call", tool)
    press(engine, 7)
    assert (lost(engine, "machine"), lost(engine, "human")) == (0, 7)


@pytest.mark.parametrize(
    "said",
    [
        f"{len(reuse.EDGES)} bins",
        f"up to {reuse.EDGES[-1]:,.0f} s",
        f"At most {reuse.MAX_CLASSES:,} are remembered",
        f"At {reuse.FADES_AT:,.0f} observations",
        f"when 1/{1 / reuse.REFRESH_AT_PART:.0f} of the observations of its class is new",
        "L = " + ", ".join(f"{leaning:.0f}" for leaning in reuse.LEANINGS),
        f"with `L = {reuse.TABLE_LEANS_BY:.0f}`",
        f"none falls below {reuse.LEAST_BELIEF:g} of the whole",
        "below " + ", ".join(f"{edge:.0f}" for edge in reuse.GAP_EDGES) + " s",
        "below " + ", ".join(f"{edge:,}" for edge in reuse.OUTPUT_EDGES) + " tokens",
        f"At least {queue._CHOOSE_AT_LEAST} blocks",
        f"1/{queue._CHOOSE_AT_LEAST_OF} of the pool",
        *(f"| `{order}` |" for order in GiveWay),
    ],
)
def test_a_number_of_the_page_is_that_of_the_code(said: str) -> None:
    assert said in PAGE.read_text()


@pytest.mark.parametrize(
    ("ended", "row"),
    [("tool_call", "a tool call"), ("final_message", "a final message"), ("cut", "a cut")],
)
def test_the_page_shows_the_cold_start_table_as_it_is(ended: str, row: str) -> None:
    counts = reuse._cold_start_table()[ended]["all"]
    total = sum(counts)
    soon = sum(counts[: reuse.bin_of(64.0)]) / total
    never = counts[reuse.NEVER] / total
    assert (
        f"| {row} | {total:,} | {soon:.0%} | {never:.0%} |".replace("%", " %") in PAGE.read_text()
    )


def test_the_page_says_how_many_turns_were_counted() -> None:
    total = sum(reuse._cold_start_table()["unknown"]["all"])
    assert f"({total:,} turns)" in PAGE.read_text()
