"""The README and the page of the wire say what the code says."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client import REGISTRY
from pydantic import BaseModel

from vllm_agent_hint import hints
from vllm_agent_hint.cli.flags import flags_table
from vllm_agent_hint.frontend import rest_models
from vllm_agent_hint.frontend.metrics import PREFIX, AgentHintMetrics, _unregister_ours

CHECKOUT = Path(__file__).resolve().parents[2]
README = CHECKOUT / "README.md"
WIRE = CHECKOUT / "docs" / "wire.md"
FROM_THE_SERVER = ("model_name", "engine")


def test_the_flags_in_the_readme_are_those_of_the_settings() -> None:
    assert flags_table() in README.read_text()


def test_a_flag_that_takes_any_text_does_not_claim_to_be_a_switch() -> None:
    rows = [row.split("|") for row in flags_table().splitlines()]
    bounds = {name.strip(" `"): bounds.strip() for _, name, _, bounds, *_ in rows}
    assert bounds["VLLM_AGENT_HINT_SECRET"] == "any text"
    assert bounds["VLLM_AGENT_HINT_TENANT_HEADER"] == "up to 256 characters"
    assert bounds["VLLM_AGENT_HINT_SHADOW"] == "0, 1"


# -- metrics -----------------------------------------------------------------------------------


@pytest.fixture
def metrics() -> Iterator[list[str]]:
    """Each metric as the README writes it: its name on the wire and its own labels."""
    AgentHintMetrics("tiny", [0])
    ours = [c for c in REGISTRY._collector_to_names if getattr(c, "_name", "").startswith(PREFIX)]
    yield [_as_written(collector) for collector in ours]
    _unregister_ours()


def _as_written(collector: object) -> str:
    name, kind = collector._name, collector._type  # type: ignore[attr-defined]
    labels = [label for label in collector._labelnames if label not in FROM_THE_SERVER]  # type: ignore[attr-defined]
    total = "_total" if kind == "counter" else ""
    return name + total + (f"{{{','.join(labels)}}}" if labels else "")


def test_the_readme_lists_every_metric_with_its_labels_and_no_other(metrics: list[str]) -> None:
    listed = re.findall(rf"^\| `({PREFIX}[^`]*)` \|", README.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(metrics)


# -- the wire ----------------------------------------------------------------------------------


@pytest.fixture
def wire_tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "scripts")
    import wire_tables

    return wire_tables


def test_the_tables_of_the_wire_are_those_of_the_models(wire_tables: ModuleType) -> None:
    page = WIRE.read_text()
    assert page == wire_tables.with_tables(page), "cure: .venv/bin/python scripts/wire_tables.py"


def test_every_field_of_every_table_has_a_meaning(wire_tables: ModuleType) -> None:
    page = WIRE.read_text()
    tables = "\n".join(re.findall(r"<!-- \w+ -->\n(.*?)<!-- end -->", page, re.DOTALL))
    assert tables
    assert not re.findall(r"^\| `.*\| +\|$", tables, re.MULTILINE)


def test_every_model_of_the_wire_has_a_table(wire_tables: ModuleType) -> None:
    models = {
        name
        for module in (hints, rest_models)
        for name, model in vars(module).items()
        if isinstance(model, type)
        and issubclass(model, BaseModel)
        and model.model_fields
        and model.__module__ == module.__name__
    }
    assert models == set(wire_tables.tables_in(WIRE.read_text()))
