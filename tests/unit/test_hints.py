"""The wire schema: any bytes are a hint, or an error that names a field of it."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_agent_hint.hints import (
    MAX_EDITS,
    MAX_ID_LENGTH,
    AgentHintParams,
    CacheControlParams,
    ContextEdit,
    ContextManagementParams,
    HintError,
    OutsideIdentity,
    parse_agent_hint,
)
from vllm_agent_hint.settings import Settings

EVICT = {"type": "evict"}

FIELD_NAMES = st.sampled_from(
    [
        "session_id",
        "parent_session_id",
        "cache_control",
        "context_management",
        "type",
        "ttl",
        "block_offset",
        "manage_request",
        "edits",
        "block_start",
        "block_end",
        "include_children",
    ]
)
WORDS = st.sampled_from(["ephemeral", "evict", "offload", "prefetch", "worker-7", ""])
# st.text() alone leaves out the lone surrogates, which JSON can spell ("\ud800").
TEXT = st.text(st.characters(exclude_categories=()))
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, 2**31, 2**64, 3600, -1])
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS | TEXT
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=MAX_EDITS + 2)
        | st.dictionaries(FIELD_NAMES | TEXT, inner, max_size=6)
    ),
    max_leaves=30,
)
# What only an offline caller can hand over.
PYTHON = st.recursive(
    SCALARS | st.binary() | st.just(object()) | st.complex_numbers(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.none() | st.integers() | st.binary() | FIELD_NAMES | TEXT, inner)
    ),
    max_leaves=20,
)
NEARLY_HINTS = st.fixed_dictionaries(
    {},
    optional={
        "session_id": WORDS | JSON,
        "parent_session_id": WORDS | JSON,
        "cache_control": st.fixed_dictionaries(
            {}, optional={"type": WORDS, "ttl": NUMBERS, "block_offset": st.none() | NUMBERS}
        )
        | JSON,
        "context_management": st.fixed_dictionaries(
            {},
            optional={
                "manage_request": st.booleans() | JSON,
                "edits": st.lists(
                    st.fixed_dictionaries(
                        {"type": WORDS},
                        optional={"block_start": st.none() | NUMBERS, "block_end": JSON},
                    )
                    | JSON,
                    max_size=MAX_EDITS + 2,
                ),
            },
        )
        | JSON,
    },
)


def assert_parsed_or_refused(value: Any) -> None:
    try:
        hint = parse_agent_hint(value)
    except HintError as refused:
        error = refused
    else:
        wire = hint.model_dump(mode="json", exclude_none=True)
        json.dumps(wire, allow_nan=False, ensure_ascii=False).encode()
        assert parse_agent_hint(wire) == hint
        assert parse_agent_hint(json.dumps(wire)) == hint
        return
    assert error.field.split(".")[0] == "agent_hint"
    assert str(error).isprintable()
    assert str(error).isascii()


@given(NEARLY_HINTS)
def test_anything_like_a_hint_is_a_hint_or_an_error_that_names_its_field(value: Any) -> None:
    assert_parsed_or_refused(value)


@given(JSON)
@example({"\ud800": 1})
@example({"session_id": "\ud800"})
@example({"cache_control": {"ttl": 10**400}})
def test_any_json_is_a_hint_or_an_error_that_names_its_field(value: Any) -> None:
    assert_parsed_or_refused(value)


@given(PYTHON)
@example({1: 2})
@example({b"session_id": "a"})
def test_any_python_object_is_a_hint_or_an_error_that_names_its_field(value: Any) -> None:
    assert_parsed_or_refused(value)


@given(TEXT | JSON.map(json.dumps) | NEARLY_HINTS.map(json.dumps))
@example("[" * 100_000)
@example("9" * 10_000)
@example('{"cache_control":{"ttl":NaN}}')
def test_any_text_is_a_hint_or_an_error_that_names_its_field(value: str) -> None:
    assert_parsed_or_refused(value)


def refusal(value: Any) -> HintError:
    with pytest.raises(HintError) as caught:
        parse_agent_hint(value)
    return caught.value


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"session": "a"}, "agent_hint.session"),
        ({"cache_control": {"tll": 3}}, "agent_hint.cache_control.tll"),
        (
            {"session_id": "a", "context_management": {"edits": [EVICT, {**EVICT, "block": 1}]}},
            "agent_hint.context_management.edits.1.block",
        ),
    ],
)
def test_an_unknown_field_is_refused_by_name(hint: Any, field: str) -> None:
    assert refusal(hint).field == field


@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"session_id": 7}, "session_id"),
        ({"session_id": ["a"]}, "session_id"),
        ({"session_id": "a", "parent_session_id": 7}, "parent_session_id"),
        ({"cache_control": []}, "cache_control"),
        ({"cache_control": {"type": "permanent"}}, "cache_control.type"),
        ({"cache_control": {"ttl": "300"}}, "cache_control.ttl"),
        ({"cache_control": {"ttl": True}}, "cache_control.ttl"),
        ({"cache_control": {"ttl": None}}, "cache_control.ttl"),
        ({"context_management": {"manage_request": 1}}, "context_management.manage_request"),
        ({"context_management": {"edits": EVICT}}, "context_management.edits"),
        ({"context_management": {"edits": ["evict"]}}, "context_management.edits.0"),
        ({"context_management": {"edits": [{}]}}, "context_management.edits.0.type"),
        ({"context_management": {"edits": [{"type": "pin"}]}}, "context_management.edits.0.type"),
    ],
)
def test_a_value_of_another_type_is_refused_never_converted(hint: Any, field: str) -> None:
    assert refusal(hint).field == f"agent_hint.{field}"


@pytest.mark.parametrize("value", [[], 3, True, float("nan"), b"{}", "null", "[]", "{", ""])
def test_anything_but_an_object_is_refused(value: Any) -> None:
    error = refusal(value)
    assert error.field == "agent_hint"
    assert "JSON object" in str(error)


@pytest.mark.parametrize("ttl", [-1, -0.001, 3600.001, 1e300, 10**400, float("nan"), float("inf")])
def test_a_ttl_outside_0_to_3600_is_refused(ttl: float) -> None:
    assert refusal({"cache_control": {"ttl": ttl}}).field == "agent_hint.cache_control.ttl"


@pytest.mark.parametrize("ttl", [0, 0.5, 300, 3600])
def test_a_ttl_of_0_to_3600_is_taken(ttl: float) -> None:
    hint = parse_agent_hint({"cache_control": {"ttl": ttl}})
    assert hint.cache_control == CacheControlParams(ttl=ttl)


@pytest.mark.parametrize(
    "identity",
    ["", "a" * (MAX_ID_LENGTH + 1), "a\nb", "a\x00b", "a\x7f", "a\u202eb", "\ud800", "a\u2028b"],
)
@pytest.mark.parametrize("field", ["session_id", "parent_session_id"])
def test_an_identity_has_1_to_256_printable_characters(field: str, identity: str) -> None:
    assert refusal({"session_id": "a", field: identity}).field == f"agent_hint.{field}"


@pytest.mark.parametrize("identity", ["a", "a" * MAX_ID_LENGTH, "agent 7/töl-\N{ROBOT FACE}"])
def test_any_printable_identity_is_taken(identity: str) -> None:
    assert parse_agent_hint({"session_id": identity}).session_id == identity


def test_edits_without_a_session_are_refused() -> None:
    error = refusal({"context_management": {"edits": [EVICT]}})
    assert error.field.startswith("agent_hint")
    assert "session_id" in str(error)


def test_a_management_request_without_a_session_is_refused() -> None:
    assert "session_id" in str(refusal({"context_management": {"manage_request": True}}))


def test_a_parent_without_a_session_is_refused() -> None:
    assert "session_id" in str(refusal({"parent_session_id": "a"}))


def test_a_session_is_never_its_own_parent() -> None:
    error = refusal({"session_id": "a", "parent_session_id": "a"})
    assert error.field.startswith("agent_hint")
    assert "parent_session_id" in str(error)


def test_more_than_16_edits_are_refused() -> None:
    def hint(edits: int) -> dict[str, Any]:
        return {"session_id": "a", "context_management": {"edits": [EVICT] * edits}}

    assert len(parse_agent_hint(hint(MAX_EDITS)).edits) == MAX_EDITS
    assert refusal(hint(MAX_EDITS + 1)).field == "agent_hint.context_management.edits"


RANGES_ON = Settings(ranges=True)


def edit_hint(**edit: Any) -> dict[str, Any]:
    return {"session_id": "a", "context_management": {"edits": [{"type": "evict", **edit}]}}


def test_a_range_is_refused_by_the_name_of_its_flag_and_taken_with_it() -> None:
    hint = edit_hint(block_start=0, block_end=3)
    error = refusal(hint)
    assert error.field == "agent_hint.context_management.edits.0.block_start"
    assert "VLLM_AGENT_HINT_RANGES" in str(error)
    assert parse_agent_hint(hint, settings=RANGES_ON).edits[0].block_end == 3


def test_a_block_offset_is_refused_by_the_name_of_its_flag_and_taken_with_it() -> None:
    hint = {"cache_control": {"block_offset": 3}}
    error = refusal(hint)
    assert error.field == "agent_hint.cache_control.block_offset"
    assert "VLLM_AGENT_HINT_RANGES" in str(error)
    assert parse_agent_hint(hint, settings=RANGES_ON).cache_control is not None


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({"block_start": 0}, "block_end"),
        ({"block_end": 3}, "block_start"),
        ({"block_start": 3, "block_end": 3}, "block_end"),
        ({"block_start": 0, "block_end": 3, "include_children": True}, "include_children"),
        ({"type": "offload", "include_children": True}, "include_children"),
    ],
)
def test_an_edit_that_addresses_nothing_names_the_field_to_correct(
    edit: dict[str, Any], field: str
) -> None:
    error = refusal(edit_hint(**edit))
    assert error.field == f"agent_hint.context_management.edits.0.{field}"


def test_more_edits_than_the_server_takes_are_refused_by_the_name_of_its_flag() -> None:
    hint = {"session_id": "a", "context_management": {"edits": [EVICT, EVICT]}}
    with pytest.raises(HintError, match="VLLM_AGENT_HINT_MAX_EDITS"):
        parse_agent_hint(hint, settings=Settings(max_edits=1))


def test_range_fields_that_are_null_mean_the_whole_context() -> None:
    edit = {**EVICT, "block_start": None, "block_end": None}
    hint = parse_agent_hint({"session_id": "a", "context_management": {"edits": [edit]}})
    assert hint.edits == [ContextEdit(type="evict")]


@given(TEXT.filter(lambda text: len(text) > 3))
def test_an_error_never_repeats_what_the_client_sent(secret: str) -> None:
    mark = "the client's own"
    value = f"\x00{mark}{secret}"
    for hint in (
        {"session_id": value},
        {"cache_control": {"ttl": value}},
        {"cache_control": {"type": value}},
        {"context_management": {"edits": [{"type": value}]}},
    ):
        said = str(refusal(hint))
        assert value not in said
        assert mark not in said, "not in another spelling either"


def test_the_name_of_an_unknown_field_comes_back_printable_and_short() -> None:
    error = refusal({"\x1b[31m" + "ä" * 5000: 1})
    assert error.field.isascii()
    assert error.field.isprintable()
    assert len(error.field) < 100


def test_an_empty_hint_asks_for_nothing() -> None:
    hint = parse_agent_hint({})
    assert hint == AgentHintParams()
    assert not hint.manages
    assert hint.edits == []


def test_cache_control_without_a_session_is_anonymous() -> None:
    hint = parse_agent_hint({"cache_control": {}})
    assert hint.session_id is None
    assert hint.cache_control == CacheControlParams(type="ephemeral", ttl=300.0)


def test_the_examples_of_the_rfc_are_taken() -> None:
    protect = parse_agent_hint(
        {
            "session_id": "worker-7",
            "parent_session_id": "orchestrator-1",
            "cache_control": {"type": "ephemeral", "ttl": 300},
        }
    )
    assert protect.parent_session_id == "orchestrator-1"
    prefetch = parse_agent_hint(
        {
            "session_id": "worker-7",
            "context_management": {"manage_request": True, "edits": [{"type": "prefetch"}]},
        }
    )
    assert prefetch.manages
    assert prefetch.edits == [ContextEdit(type="prefetch")]


def test_a_hint_is_the_same_as_mapping_as_text_and_as_an_object() -> None:
    value = {
        "session_id": "a",
        "context_management": {"edits": [EVICT]},
        "cache_control": {"ttl": 9},
    }
    hint = AgentHintParams(
        session_id="a",
        cache_control=CacheControlParams(ttl=9),
        context_management=ContextManagementParams(edits=[ContextEdit(type="evict")]),
    )
    assert parse_agent_hint(value) == hint
    assert parse_agent_hint(json.dumps(value)) == hint
    assert parse_agent_hint(hint) is hint


def test_an_error_names_the_field_where_the_hint_stood() -> None:
    with pytest.raises(HintError) as caught:
        parse_agent_hint({"session_id": 5}, field="vllm_xargs.agent_hint")
    assert caught.value.field == "vllm_xargs.agent_hint.session_id"


def test_a_lease_for_nothing_is_refused() -> None:
    hint = {
        "session_id": "a",
        "cache_control": {"ttl": 60},
        "context_management": {"manage_request": True},
    }
    with pytest.raises(HintError) as refused:
        parse_agent_hint(hint)
    assert refused.value.field == "agent_hint.cache_control"


# -- an identity beside the hint -------------------------------------------------------------------

BESIDE = OutsideIdentity("beside", "X-Session-ID")


@pytest.mark.parametrize(
    "hint",
    [
        {},
        {"session_id": None},
        {"parent_session_id": "a"},
        {"context_management": {"edits": [EVICT]}},
        {"context_management": {"manage_request": True}},
        '{"parent_session_id": "a"}',
        AgentHintParams(cache_control=CacheControlParams(ttl=3)),
    ],
)
def test_a_hint_without_a_session_takes_the_one_beside_it(hint: Any) -> None:
    assert parse_agent_hint(hint, identity=BESIDE).session_id == "beside"


def test_a_hints_own_session_goes_before_the_one_beside_it() -> None:
    for wrong in ("", 5, "a" * 257):
        beside = OutsideIdentity(wrong, "X-Session-ID")
        assert parse_agent_hint({"session_id": "own"}, identity=beside).session_id == "own"


@pytest.mark.parametrize("wrong", ["", "a" * 257, "\x07", "\ud800", 5, ["a"], {"a": 1}, True])
def test_a_wrong_session_beside_a_hint_is_named_by_its_place(wrong: Any) -> None:
    with pytest.raises(HintError) as caught:
        parse_agent_hint({}, identity=OutsideIdentity(wrong, "X-Session-ID"))
    assert caught.value.field == "X-Session-ID"
    assert "session_id" in caught.value.message


def test_a_session_beside_a_hint_is_not_its_own_parent() -> None:
    with pytest.raises(HintError, match="parent_session_id"):
        parse_agent_hint({"parent_session_id": "beside"}, identity=BESIDE)


@given(value=JSON)
def test_a_session_beside_it_makes_no_hint_of_what_is_none(value: Any) -> None:
    try:
        hint = parse_agent_hint(value, identity=BESIDE)
    except HintError:
        return
    assert hint.session_id
