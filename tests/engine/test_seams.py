"""What is replaced in vLLM, and the first two rings of failing open.

``install`` patches a whole process, so it runs in processes of its own.
"""

import json
import os
import subprocess
import sys
from dataclasses import field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wrapt
from vllm.v1.core import kv_cache_coordinator, kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.conftest import Log
from tests.engine.rig import make_scheduler
from vllm_agent_hint import probe, seams
from vllm_agent_hint.engine.scheduler import AgentSchedulerMixin, agent_scheduler
from vllm_agent_hint.engine.utility import agent_hint_rpc
from vllm_agent_hint.kvcache.manager import KVCacheManagerMixin
from vllm_agent_hint.kvcache.pool import AgentBlockPool


@pytest.fixture(autouse=True)
def _forget_inactivity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "why_inactive", "")


def extended(base: Any) -> Any:
    return seams.extend_scheduler_class(lambda: base, None, (), {})


def in_a_new_process(script: str, **environment: str) -> tuple[dict[str, Any], str]:
    """Run a script whose last line prints JSON. Returns that, and what it logged."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


# -- what an installed plugin replaces ---------------------------------------------------------

LOOK_AT_VLLM = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
from vllm.plugins import load_general_plugins
load_general_plugins()
if TWICE:
    import vllm_agent_hint
    vllm_agent_hint.register()
    vllm_agent_hint.seams.install()
from vllm.config.scheduler import SchedulerConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import SchedulerStats

def wrappers(function):
    n = 0
    while hasattr(function, "__wrapped__"):
        function, n = function.__wrapped__, n + 1
    return n

chosen = [
    SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, async_scheduling=asynchronous
    ).get_scheduler_cls()
    for asynchronous in (False, True)
]
print(json.dumps({
    "wrappers": wrappers(SchedulerConfig.get_scheduler_cls),
    "schedulers": [[cls.__name__ for cls in one.__mro__[:3]] for one in chosen],
    "rpc": hasattr(EngineCore, "agent_hint_rpc"),
    "stats": [name for name in SchedulerStats.__dataclass_fields__ if "agent" in name],
    "modules": sorted(m for m in sys.modules if m.startswith("vllm_agent_hint")),
}))
"""


def test_installing_twice_enters_each_seam_once_and_says_what_is_active() -> None:
    found, log = in_a_new_process(LOOK_AT_VLLM.replace("TWICE", "True"), VLLM_AGENT_HINT="1")
    assert found["wrappers"] == 1
    assert found["schedulers"] == [
        ["AgentHintScheduler", "AgentSchedulerMixin", "Scheduler"],
        ["AgentHintAsyncScheduler", "AgentSchedulerMixin", "AsyncScheduler"],
    ]
    assert found["rpc"] is True
    assert found["stats"] == ["agent_hint"]
    assert log.count("active for vLLM") == 2, "once per engine"
    assert "protected_share=1.0" in log


def test_switched_off_nothing_of_vllm_is_replaced_and_nothing_imported() -> None:
    found, log = in_a_new_process(LOOK_AT_VLLM.replace("TWICE", "False"), VLLM_AGENT_HINT="0")
    assert found["wrappers"] == 0
    assert [mro[0] for mro in found["schedulers"]] == ["Scheduler", "AsyncScheduler"]
    assert found["rpc"] is False
    assert found["stats"] == []
    assert "vllm_agent_hint.seams" not in found["modules"]
    assert not [m for m in found["modules"] if m.split(".")[1:2] in (["engine"], ["kvcache"])]
    assert "agent-hint" not in log


def test_a_bad_setting_disables_the_plugin_in_one_line_and_raises_nothing() -> None:
    script = """
import json, logging, sys
logging.basicConfig(stream=sys.stdout)
import vllm_agent_hint
vllm_agent_hint.register()
print(json.dumps({"seams": "vllm_agent_hint.seams" in sys.modules}))
"""
    found, log = in_a_new_process(script, VLLM_AGENT_HINT_PROTECTED_SHARE="7")
    assert found == {"seams": False}
    lines = [line for line in log.splitlines() if "vllm-agent-hint" in line]
    assert len(lines) == 1
    assert "disabled" in lines[0]
    assert "PROTECTED_SHARE" in lines[0].upper()
    assert "Traceback" not in log


# -- ring two: looking before touching ---------------------------------------------------------


@pytest.mark.parametrize("base", [Scheduler, AsyncScheduler])
def test_a_vllm_that_is_as_expected_gets_the_mixin(base: type, log: Log) -> None:
    assert extended(base) is agent_scheduler(base)
    assert [r.levelname for r in log.records] == ["INFO"]
    assert seams.why_inactive == ""


def test_a_schedulers_own_subclass_keeps_its_behaviour() -> None:
    class Custom(AsyncScheduler):
        def get_num_unfinished_requests(self) -> int:
            return 42

    cls = extended(Custom)
    assert issubclass(cls, Custom)
    assert cls.get_num_unfinished_requests(None) == 42
    assert extended(Custom) is cls


def add_queue_method(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(FreeKVCacheBlockQueue, "rotate", lambda self: None, raising=False)
    return "rotate"


def drop_queue_method(patch: pytest.MonkeyPatch) -> str:
    patch.delattr(FreeKVCacheBlockQueue, "prepend_n")
    return "prepend_n"


def add_block_field(patch: pytest.MonkeyPatch) -> str:
    donor = make_dataclass("Donor", [("colour", int, field(default=0))])
    patch.setitem(KVCacheBlock.__dataclass_fields__, "colour", donor.__dataclass_fields__["colour"])
    return "colour"


def change_block_class(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(kv_cache_utils, "KVCacheBlock", type("KVCacheBlock", (), {}))
    return "KVCacheBlock"


def build_another_pool(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(kv_cache_coordinator, "BlockPool", type("BlockPool", (BlockPool,), {}))
    return "kv_cache_coordinator:BlockPool"


def change_block_hash(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(kv_cache_utils, "make_block_hash_with_group_id", lambda h, g: (h, g))
    return "make_block_hash_with_group_id"


BREAKAGES = [
    add_queue_method,
    drop_queue_method,
    add_block_field,
    change_block_class,
    build_another_pool,
    change_block_hash,
]
CLASSES = {"Scheduler": Scheduler, "KVCacheManager": KVCacheManager, "BlockPool": BlockPool}


def assert_stock_and_said_once(name: str, base: Any, log: Log) -> None:
    assert extended(base) is base
    [record] = log.records
    assert record.levelname == "WARNING"
    assert name in record.getMessage()
    assert name in seams.why_inactive


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_class_that_has_changed_leaves_the_engine_stock(
    breakage: Any, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    name = breakage(monkeypatch)
    assert_stock_and_said_once(name, Scheduler, log)


@pytest.mark.parametrize(
    ("owner", "method"),
    [s[1:3] for s in probe._SIGNATURES if s[2] not in probe._NOT_IN_EVERY_VERSION],
)
def test_a_method_that_was_renamed_leaves_the_engine_stock(
    owner: str, method: str, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    for cls in CLASSES[owner].__mro__:
        if method in vars(cls):
            monkeypatch.delattr(cls, method)
    assert_stock_and_said_once(f"{owner}.{method}", Scheduler, log)


def test_a_method_that_only_a_metric_needs_may_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in probe._NOT_IN_EVERY_VERSION:
        monkeypatch.delattr(KVCacheManager, name)
    assert extended(Scheduler) is not Scheduler


@pytest.mark.parametrize(("owner", "method"), [s[1:3] for s in probe._SIGNATURES if s[3]])
def test_a_method_that_takes_something_else_leaves_the_engine_stock(
    owner: str, method: str, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    monkeypatch.setattr(CLASSES[owner], method, lambda self, something_else: None)
    assert_stock_and_said_once(f"{owner}.{method}", Scheduler, log)


class NoScheduler:
    """Such as a bare ``SchedulerInterface`` of a user's own."""


@pytest.mark.parametrize("base", [NoScheduler, "not even a class", None])
def test_a_scheduler_that_does_not_derive_from_vllms_is_left_alone(base: Any, log: Log) -> None:
    name = getattr(base, "__name__", repr(base))
    assert_stock_and_said_once(name, base, log)


def test_a_fault_of_the_probe_itself_leaves_the_engine_stock(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    def fail(_: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(seams, "probe_engine", fail)
    assert_stock_and_said_once("planted", Scheduler, log)


def test_every_method_that_is_overridden_has_been_looked_at() -> None:
    looked_at = {(owner, method) for _, owner, method, _ in probe._SIGNATURES}
    for ours, stock in (
        (AgentSchedulerMixin, Scheduler),
        (KVCacheManagerMixin, KVCacheManager),
        (AgentBlockPool, BlockPool),
    ):
        overridden = {
            name
            for name, value in vars(ours).items()
            if callable(value) and not name.startswith("__") and hasattr(stock, name)
        }
        assert {(stock.__name__, name) for name in overridden} <= looked_at


def test_an_engine_left_stock_answers_management_with_unsupported_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = add_queue_method(monkeypatch)
    extended(Scheduler)
    core = SimpleNamespace(scheduler=make_scheduler(plugged=False))
    answer = agent_hint_rpc(
        core, {"op": "edit", "session_id": "agent", "edits": [{"type": "evict"}] * 2}
    )
    assert answer["active"] is False
    assert name in answer["reason"]
    assert [r["status"] for r in answer["results"]] == ["unsupported", "unsupported"]
    assert all(name in r["reason"] for r in answer["results"])


def test_the_probe_reports_what_it_found_for_every_seam() -> None:
    report = seams.probe_environment()
    assert report.active
    assert report.reason == ""
    assert {s.name for s in seams.SEAMS} <= {f.seam for f in report.findings}
    assert all(f.ok for f in report.findings)


def test_the_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = drop_queue_method(monkeypatch)
    report = seams.probe_environment()
    assert not report.active
    assert name in report.reason


# -- a seam whose target has moved -------------------------------------------------------------


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.name)
def test_a_seam_that_has_moved_is_named_with_what_is_lost(seam: seams.Seam, log: Log) -> None:
    seams._entering(seam)(ModuleType(seam.module))
    [record] = log.records
    assert record.levelname == "WARNING"
    assert seam.name in record.getMessage()
    assert seam.purpose in record.getMessage()


def test_a_module_whose_seam_has_moved_is_imported_all_the_same(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    (tmp_path / "a_moved_serving_module.py").write_text("class Renamed:\n    answer = 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seam = seams.Seam(
        "a_moved_serving_module",
        "Serving.create",
        "vllm_agent_hint.frontend.completion:create_completion",
        "hints on this route",
    )
    wrapt.register_post_import_hook(seams._entering(seam), seam.module)
    import a_moved_serving_module

    assert a_moved_serving_module.Renamed.answer == 42
    assert "a_moved_serving_module:Serving.create" in log.text


def test_a_seam_of_ours_that_fails_is_named_and_the_target_untouched(
    log: Log,
) -> None:
    module = ModuleType("somewhere")
    module.Serving = type("Serving", (), {"create": lambda self: 42})  # type: ignore[attr-defined]
    seam = seams.Seam("somewhere", "Serving.create", "vllm_agent_hint.nowhere:create", "hints")
    seams._entering(seam)(module)
    assert module.Serving().create() == 42
    assert "somewhere:Serving.create" in log.text
