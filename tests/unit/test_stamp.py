"""What the front end says of a hint, and that nobody else can say it."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_agent_hint.settings import load_settings
from vllm_agent_hint.stamp import Stamp, digest_of, make_secret, open_stamp

STAMP = Stamp({"session_id": "a"}, "tenant", "op", 2)


def test_a_stamp_opens_to_what_was_sealed() -> None:
    assert open_stamp(STAMP.sealed()) == STAMP


def test_a_stamp_shows_nothing_of_itself_and_travels_as_plain_data() -> None:
    """vLLM logs the parameters of requests, where asked to."""
    sealed = copy.deepcopy(STAMP.sealed())

    assert repr(sealed) == "<agent hint, operation op of 2>"
    assert open_stamp(msgspec.msgpack.decode(msgspec.msgpack.encode(sealed))) == STAMP


@given(
    st.sampled_from(["hint", "tenant", "operation_id", "engine_requests", "mac"]),
    st.none() | st.text() | st.integers() | st.dictionaries(st.text(), st.text()),
)
def test_a_changed_stamp_does_not_open(field: str, value: Any) -> None:
    sealed = STAMP.sealed()
    if sealed[field] != value:
        assert open_stamp({**sealed, field: value}) is None


@pytest.mark.parametrize("forged", [None, "x", 5, [], {}, {"mac": "x"}, {"mac": "\ud800"}])
def test_what_is_no_stamp_does_not_open(forged: Any) -> None:
    assert open_stamp(forged) is None


def test_another_secret_makes_another_stamp_and_another_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed, digest = STAMP.sealed(), digest_of("key")
    monkeypatch.setenv("VLLM_AGENT_HINT_SECRET", "another")
    load_settings.cache_clear()
    try:
        assert open_stamp(sealed) is None
        assert digest_of("key") != digest
    finally:
        monkeypatch.undo()
        load_settings.cache_clear()


def test_a_secret_is_made_once_and_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_AGENT_HINT_SECRET", raising=False)
    load_settings.cache_clear()
    try:
        make_secret()
        first = load_settings().secret.get_secret_value()
        make_secret()
        assert len(first) == 64
        assert load_settings().secret.get_secret_value() == first
    finally:
        monkeypatch.undo()
        monkeypatch.delenv("VLLM_AGENT_HINT_SECRET", raising=False)
        load_settings.cache_clear()
