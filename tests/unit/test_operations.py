"""What became of an operation: known to its own tenant, for ten minutes, within a bound.

``engine.operations`` knows nothing of vLLM, so these run without it.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.naive_operations import NaiveOperations
from vllm_agent_hint.engine.operations import KEPT_SECONDS, Operation, OperationStore
from vllm_agent_hint.hints import EditResult, EditStatus, EditType

EVICT = EditType.EVICT
APPLIED = EditResult(type=EVICT, status=EditStatus.APPLIED, blocks=3, tokens=384)


def make_store(max_operations: int = 100) -> OperationStore:
    return OperationStore(max_operations=max_operations)


def test_an_operation_that_was_never_opened_is_unknown() -> None:
    assert make_store().get("op", "", 0.0) is None


def test_an_open_operation_is_pending_and_so_is_each_of_its_edits() -> None:
    store = make_store()
    store.open("op", "tenant", [EVICT, EditType.OFFLOAD])

    found = store.get("op", "tenant", 1e9)

    assert found is not None
    assert found.is_pending
    assert [(r.type, r.status) for r in found.results] == [
        (EVICT, EditStatus.PENDING),
        (EditType.OFFLOAD, EditStatus.PENDING),
    ]


def test_an_operation_that_has_ended_tells_its_results_and_what_is_retained() -> None:
    store = make_store()
    store.open("op", "tenant", [EVICT])
    store.finish("op", "tenant", [APPLIED], {"blocks": 7, "clipped_by": None}, 10.0)

    found = store.get("op", "tenant", 10.0)

    assert found == Operation(False, (APPLIED,), {"blocks": 7, "clipped_by": None})
    assert found.as_plain() == {
        "status": "done",
        "results": [APPLIED.model_dump(mode="json")],
        "retention": {"blocks": 7, "clipped_by": None},
    }


def test_to_another_tenant_it_is_as_unknown_as_one_that_never_was() -> None:
    store = make_store()
    store.open("pending", "a", [EVICT])
    store.finish("ended", "a", [APPLIED], None, 0.0)

    for tenant in ("b", ""):
        assert store.get("pending", tenant, 0.0) is None
        assert store.get("ended", tenant, 0.0) is None


def test_an_id_of_another_tenant_can_be_neither_taken_nor_ended() -> None:
    store = make_store()
    store.open("op", "a", [EVICT])
    store.finish("op", "b", [], None, 0.0)
    store.open("op", "b")

    found = store.get("op", "a", 0.0)

    assert found is not None
    assert found.is_pending
    assert len(found.results) == 1


def test_it_is_forgotten_ten_minutes_after_its_end_however_long_it_took() -> None:
    store = make_store()
    store.open("op", "", [EVICT])
    end = 10 * KEPT_SECONDS
    store.finish("op", "", [APPLIED], None, end)

    assert KEPT_SECONDS == 600.0
    assert store.get("op", "", end + 599.9) is not None
    assert store.get("op", "", end + 600.0) is None
    assert len(store) == 0


def known(store: OperationStore, tenant: str, *names: str) -> list[str]:
    return [name for name in names if store.get(name, tenant, 0.0) is not None]


def test_above_the_bound_the_oldest_is_forgotten_and_no_kind_crowds_out_another() -> None:
    store = make_store(max_operations=2)
    for k in range(3):
        store.finish(f"edited-{k}", "", [APPLIED], None, 0.0)
        store.finish(f"plain-{k}", "", [], None, 0.0)
        store.open(f"pending-{k}", "")

    assert known(store, "", *(f"edited-{k}" for k in range(3))) == ["edited-1", "edited-2"]
    assert known(store, "", *(f"plain-{k}" for k in range(3))) == ["plain-1", "plain-2"]
    assert known(store, "", *(f"pending-{k}" for k in range(3))) == ["pending-1", "pending-2"]


def test_who_has_most_gives_way_so_that_no_tenant_flushes_the_results_of_another() -> None:
    store = make_store(max_operations=10)
    for k in range(4):
        store.finish(f"{k}", "quiet", [APPLIED], None, 0.0)
    for k in range(1_000):
        store.finish(f"{k}", f"loud-{k % 2}", [APPLIED], None, 0.0)

    assert known(store, "quiet", *map(str, range(4))) == ["0", "1", "2", "3"]
    left = [known(store, f"loud-{n}", *map(str, range(1_000))) for n in (0, 1)]
    assert left == [["994", "996", "998"], ["995", "997", "999"]]


def test_many_ordinary_requests_leave_the_results_of_edits_where_they_are() -> None:
    store = make_store(max_operations=10)
    store.finish("edits", "", [APPLIED], None, 0.0)
    for k in range(100):
        store.finish(f"{k}", "", [], {"blocks": 7}, 1.0)
    assert store.get("edits", "", 599.0) == Operation(False, (APPLIED,))


def test_what_is_pending_has_failed_ten_minutes_after_it_fell_silent() -> None:
    store = make_store()
    store.open("op", "", [EVICT])
    store.open("alive", "", [EVICT])
    store.fall_silent("op", "", 100.0)

    still = store.get("op", "", 699.0)
    assert still is not None
    assert still.is_pending
    failed = store.get("op", "", 700.0)
    assert failed is not None
    assert not failed.is_pending
    assert failed.results[0].status is EditStatus.FAILED
    assert "never reached this engine" in failed.results[0].reason
    alive = store.get("alive", "", 1e9)
    assert alive is not None
    assert alive.is_pending, "a request may run for as long as it likes"
    assert store.get("op", "", 1300.0) is None


def test_what_goes_on_is_silent_no_more() -> None:
    store = make_store()
    store.open("op", "", [EVICT])
    store.fall_silent("op", "", 0.0)
    store.open("op", "", [EVICT])
    found = store.get("op", "", 1e9)
    assert found is not None
    assert found.is_pending


def test_when_sessions_are_dropped_what_was_pending_has_failed_with_the_reason() -> None:
    store = make_store()
    store.open("op", "tenant", [EVICT])
    store.finish("done", "tenant", [APPLIED], None, 0.0)
    store.abandon("sessions were dropped", 0.0)

    found = store.get("op", "tenant", 0.0)

    assert found is not None
    assert not found.is_pending
    assert [(r.status, r.reason) for r in found.results] == [
        (EditStatus.FAILED, "sessions were dropped")
    ]
    assert store.get("done", "tenant", 0.0) == Operation(False, (APPLIED,))


IDS = ["1", "2", "3", "4"]
TENANTS = ["", "a", "b"]
EDITS = st.lists(st.sampled_from(list(EditType)), max_size=3)
RESULTS = st.lists(
    st.builds(
        EditResult,
        type=st.sampled_from(list(EditType)),
        status=st.sampled_from(list(EditStatus)),
        blocks=st.integers(0, 9),
        reason=st.text(max_size=3),
    ),
    max_size=3,
)
RETENTION = st.none() | st.dictionaries(
    st.text(max_size=3), st.integers() | st.none() | st.text(max_size=3), max_size=2
)


class SameAsNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = OperationStore(kept_seconds=10.0, max_operations=3)
        self.naive = NaiveOperations(kept_seconds=10.0, max_operations=3)
        self.now = 0.0

    @rule(operation_id=st.sampled_from(IDS), tenant=st.sampled_from(TENANTS), edits=EDITS)
    def open(self, operation_id: str, tenant: str, edits: list[EditType]) -> None:
        self.store.open(operation_id, tenant, edits)
        self.naive.open(operation_id, tenant, edits)

    @rule(
        operation_id=st.sampled_from(IDS),
        tenant=st.sampled_from(TENANTS),
        results=RESULTS,
        retention=RETENTION,
    )
    def finish(
        self,
        operation_id: str,
        tenant: str,
        results: list[EditResult],
        retention: dict[str, Any] | None,
    ) -> None:
        self.store.finish(operation_id, tenant, results, retention, self.now)
        self.naive.finish(operation_id, tenant, results, retention, self.now)

    @rule(operation_id=st.sampled_from(IDS), tenant=st.sampled_from(TENANTS))
    def fall_silent(self, operation_id: str, tenant: str) -> None:
        self.store.fall_silent(operation_id, tenant, self.now)
        self.naive.fall_silent(operation_id, tenant, self.now)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def abandon(self) -> None:
        self.store.abandon("why", self.now)
        self.naive.abandon("why", self.now)

    @invariant()
    def everybody_gets_the_same_answers(self) -> None:
        for tenant in TENANTS:
            for operation_id in IDS:
                found = self.store.get(operation_id, tenant, self.now)
                answer = found and (found.is_pending, list(found.results), found.retention)
                assert answer == self.naive.get(operation_id, tenant, self.now)
        assert len(self.store) == len(self.naive.entries) <= 9


TestSameAsNaive = SameAsNaive.TestCase
TestSameAsNaive.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
