"""Flags: typed, bounded, and a misspelt one is noticed."""

import pytest
from pydantic import ValidationError

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


def test_a_misspelt_flag_is_noticed() -> None:
    found = unknown_flags(["VLLM_AGENT_HINT_TTL", "VLLM_AGENT_HINT_RENEW", "VLLM_USE_V1", "PATH"])

    assert found == ["VLLM_AGENT_HINT_TTL"]
