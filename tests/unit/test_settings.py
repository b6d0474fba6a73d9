"""Flags: typed, bounded, and a misspelt one is noticed."""

import ast
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

import vllm_agent_hint
from vllm_agent_hint.settings import Settings, unknown_flags


def test_a_flag_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_AGENT_HINT_PROTECTED_SHARE", "0.5")
    monkeypatch.setenv("VLLM_AGENT_HINT", "0")

    settings = Settings()

    assert settings.protected_share == 0.5
    assert not settings.enabled


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("PROTECTED_SHARE", "1.5"),
        ("PROTECTED_SHARE", "nan"),
        ("MAX_SESSIONS", "0"),
        ("IDLE_SECONDS", "0"),
        ("IDLE_SECONDS", "3601"),
        ("EXPIRED_ENTERS", "middle"),
        ("RELEASE_SLICE", "many"),
    ],
)
def test_a_value_out_of_bounds_names_its_flag(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: str
) -> None:
    monkeypatch.setenv(f"VLLM_AGENT_HINT_{flag}", value)

    with pytest.raises(ValidationError, match=flag.lower()):
        Settings()


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_flag_is_read_somewhere(name: str) -> None:
    package = Path(vllm_agent_hint.__file__).parent
    readers = [
        path
        for path in package.rglob("*.py")
        if path.name != "settings.py"
        and any(
            isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(parsed(path))
        )
    ]
    assert readers


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_a_misspelt_flag_is_noticed() -> None:
    found = unknown_flags(["VLLM_AGENT_HINT_TTL", "VLLM_AGENT_HINT_RENEW", "VLLM_USE_V1", "PATH"])

    assert found == ["VLLM_AGENT_HINT_TTL"]
