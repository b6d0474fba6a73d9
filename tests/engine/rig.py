"""vLLM's real scheduler, KV cache manager and block pool, without a model behind them."""

import itertools
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from vllm_agent_hint.cli.bench.engine import BLOCK_SIZE as BLOCK
from vllm_agent_hint.cli.bench.engine import (
    SAMPLED_TOKEN,
    build_request,
    build_scheduler,
    model_output,
)
from vllm_agent_hint.engine import hooks as engine_hooks
from vllm_agent_hint.engine.scheduler import agent_scheduler
from vllm_agent_hint.engine.utility import agent_hint_rpc
from vllm_agent_hint.kvcache.block import Zone
from vllm_agent_hint.sessions.intent import SessionKey
from vllm_agent_hint.sessions.session import Session
from vllm_agent_hint.settings import Settings

KINDS = ("full", "window", "state", "all")


def group_specs(kind: str) -> list[Any]:
    """KV cache groups: ``full``, ``window`` (full + sliding window), ``state`` (full + Mamba),
    ``all`` (the three together), ``states`` (full + two of Mamba, as a hybrid model that has more
    state layers than attention layers is divided)."""
    attention: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    full = FullAttentionSpec(**attention)
    window = SlidingWindowSpec(**attention, sliding_window=2 * BLOCK)
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    return {
        "full": [full],
        "window": [full, window],
        "state": [full, state],
        "all": [full, window, state],
        "states": [full, state, state],
    }[kind]


def make_scheduler(
    *,
    plugged: bool,
    num_blocks: int = 64,
    kind: str = "full",
    asynchronous: bool = False,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    enable_caching: bool = True,
    settings: Settings | None = None,
    base: type | None = None,
    kv_transfer_config: Any = None,
) -> Any:
    """Build a stock scheduler, or one with the plugin's mixin laid over it.

    Args:
        plugged: Whether the mixin is laid over it.
        num_blocks: Size of the block pool, the null block included.
        kind: See ``group_specs``.
        asynchronous: Use ``AsyncScheduler``.
        max_num_batched_tokens: Small values chunk prefills.
        max_num_seqs: Requests that run at once.
        enable_caching: Prefix caching.
        settings: The plugin's, if not those of the environment.
        base: Another class to build, or to lay the mixin over.
        kv_transfer_config: vLLM's, for a KV connector.
    """
    base = base or (AsyncScheduler if asynchronous else Scheduler)
    scheduler_cls = agent_scheduler(base) if plugged else base
    specs = group_specs(kind)
    has_state = any(isinstance(spec, MambaSpec) for spec in specs)
    settings = settings or engine_hooks.load_settings()
    with patch.object(engine_hooks, "load_settings", lambda: settings):
        return build_scheduler(
            scheduler_cls,
            specs,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            asynchronous=asynchronous,
            enable_caching=enable_caching,
            mamba_cache_mode="align" if has_state else None,
            kv_transfer_config=kv_transfer_config,
        )


def make_request(
    request_id: str,
    tokens: Sequence[int],
    *,
    max_tokens: int = 2,
    hint: dict[str, Any] | None = None,
    cache_salt: str | None = None,
    extra_args: dict[str, Any] | None = None,
) -> Request:
    """A request as the engine core would hand it to the scheduler."""
    extra = dict(extra_args or {})
    if hint is not None:
        extra["agent_hint"] = hint
    return build_request(
        request_id, tokens, max_tokens=max_tokens, extra_args=extra or None, cache_salt=cache_salt
    )


def prompt(family: int, num_tokens: int) -> list[int]:
    """A prompt; two of one family share the shorter one as their prefix."""
    return [10 + (family * 7919 + i * i * 31 + i) % 1000 for i in range(num_tokens)]


def hinted(session_id: str | None = None, ttl: float | None = None, *edits: str) -> dict[str, Any]:
    """An ``agent_hint`` as a client would write it."""
    hint: dict[str, Any] = {}
    if session_id is not None:
        hint["session_id"] = session_id
    if ttl is not None:
        hint["cache_control"] = {"ttl": ttl}
    if edits:
        hint["context_management"] = {"edits": [{"type": edit} for edit in edits]}
    return hint


class Clock:
    """The time that the plugin's engine side reads while this is entered.

    vLLM's own calls read the real one.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        ours = SimpleNamespace(monotonic=lambda: self.now)
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm_agent_hint.engine.") and "time" in vars(module):
                self._patches.enter_context(patch.object(module, "time", ours))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Engine:
    """A scheduler and a stand-in for the model, which always samples the same token.

    Args:
        scheduler: From ``make_scheduler``.
        depth: Steps in flight: 1 is synchronous, 2 is what async scheduling does.
    """

    scheduler: Any
    depth: int = 1
    log: list[Any] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    _in_flight: list[Any] = field(default_factory=list)
    _ids: Any = field(default_factory=itertools.count)

    def add(self, tokens: Sequence[int], **kwargs: Any) -> str:
        request_id = kwargs.pop("request_id", None) or f"r{next(self._ids)}"
        self.scheduler.add_request(make_request(request_id, tokens, **kwargs))
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Schedule one step; take back the output of the oldest one that is due."""
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.cached.setdefault(new.req_id, new.num_computed_tokens)
        self._in_flight.append(self._executed(output))
        while len(self._in_flight) >= self.depth:
            self._return(*self._in_flight.pop(0))

    def _executed(self, output: Any) -> tuple[Any, ...]:
        """What a worker does of a step. Returns what ``_return`` takes, once it is due."""
        self.log.append(_summary(output))
        return output, self._sampling(output)

    def drain(self) -> None:
        while self._in_flight:
            self._return(*self._in_flight.pop(0))

    def run(self, limit: int = 400) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self._wants_steps():
                self.drain()
                if not self._wants_steps():
                    return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def _wants_steps(self) -> bool:
        ours = getattr(self.scheduler, "agent_hint", None)
        releases = ours is not None and ours.wants_steps
        return releases or self.scheduler.has_unfinished_requests()

    def serve(self, tokens: Sequence[int], **kwargs: Any) -> int:
        """Run one request to its end. Returns the prompt tokens that it found cached."""
        request_id = self.add(tokens, **kwargs)
        self.run()
        return self.cached[request_id]

    def edit(
        self, session_id: str, *edits: str | dict[str, Any], cache_salt: str | None = None
    ) -> list[dict[str, Any]]:
        """A management call that is done when it returns, as that of an offline engine is."""
        wire = [{"type": e} if isinstance(e, str) else e for e in edits or ("evict",)]
        answer = self.call(
            "edit", session_id=session_id, cache_salt=cache_salt, edits=wire, at_once=True
        )
        results: list[dict[str, Any]] = answer["results"]
        return results

    def call(self, op: str, **payload: Any) -> Any:
        """A management call, as the engine core runs it between two steps.

        Returns:
            The answer, or a future of it.
        """
        core = SimpleNamespace(scheduler=self.scheduler)
        answer = agent_hint_rpc(core, {"op": op, "operation_id": "op", **payload})
        assert isinstance(answer, Future) or answer["active"], answer["reason"]
        return answer

    # -- looking ---------------------------------------------------------------------------------

    @property
    def sam(self) -> Any:
        assert self.scheduler.agent_hint.sam is not None, self.scheduler.agent_hint.reason
        return self.scheduler.agent_hint.sam

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def session(self, session_id: str, *, cache_salt: str | None = None) -> Session:
        session: Session = self.sam.sessions[SessionKey("", cache_salt, session_id)]
        return session

    def free_ids(self) -> list[int]:
        """Free blocks in the order of reuse."""
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def zone_ids(self, zone: Zone) -> list[int]:
        """The free blocks of one zone in the order of reuse."""
        return [block.block_id for block in self.pool.free_block_queue.iter_zone(zone)]

    def cached_ids(self, tokens: Sequence[int], group: int = 0) -> list[int | None]:
        """Which block serves each whole block of a prompt in a KV cache group, if any does."""
        request = make_request("looked-up", tokens)
        found = []
        for block_hash in request.block_hashes:
            blocks = self.pool.get_cached_block(block_hash, [group])
            found.append(blocks[0].block_id if blocks else None)
        return found

    def _sampling(self, output: Any) -> set[str]:
        """The requests whose prefill a step that was just scheduled completes."""
        scheduled = [self.scheduler.requests[r] for r in output.num_scheduled_tokens]
        return {r.request_id for r in scheduled if not r.is_prefill_chunk}

    def _return(self, output: Any, sampling: set[str]) -> None:
        ids = list(output.num_scheduled_tokens)
        outputs = self.scheduler.update_from_output(
            output,
            model_output(ids, [[SAMPLED_TOKEN] if r in sampling else [] for r in ids]),
        )
        self.log.append(
            [
                (o.request_id, list(o.new_token_ids), o.finish_reason)
                for client in outputs.values()
                for o in client.outputs
            ]
        )


def _summary(output: Any) -> Any:
    """All that a worker would see of a step."""
    cached = output.scheduled_cached_reqs
    return (
        [(n.req_id, n.block_ids, n.num_computed_tokens) for n in output.scheduled_new_reqs],
        (list(cached.req_ids), cached.new_block_ids, list(cached.num_computed_tokens)),
        dict(output.num_scheduled_tokens),
        sorted(output.finished_req_ids),
        sorted(getattr(output, "preempted_req_ids", None) or ()),
    )
