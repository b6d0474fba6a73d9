"""What a scheduling step of requests without hints costs beside stock."""

import random
from typing import Any, Final

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_agent_hint.cli.bench.engine import (
    SAMPLED_TOKEN,
    build_request,
    build_scheduler,
    full_attention,
    model_output,
)
from vllm_agent_hint.cli.bench.figure import Measured
from vllm_agent_hint.cli.bench.paired import clock, compare_in_pairs
from vllm_agent_hint.engine.scheduler import agent_scheduler

DECODING: Final = 64
STEPS_PER_SECTION: Final = 100


def unhinted_steps(*, sections: int) -> Measured:
    """``schedule`` and ``update_from_output`` with 64 requests that decode."""
    arms = [_StepSection(cls) for cls in (Scheduler, agent_scheduler(Scheduler))]
    return Measured.of(
        compare_in_pairs(arms[0], arms[1], pairs=sections, unit_count=STEPS_PER_SECTION)
    )


class _StepSection:
    def __init__(self, scheduler_cls: Any) -> None:
        self._scheduler = build_scheduler(
            scheduler_cls,
            full_attention(),
            num_blocks=60_000,
            max_num_seqs=DECODING,
            max_num_batched_tokens=8_192,
        )
        rng = random.Random(2)
        for number in range(DECODING):
            prompt = [rng.randrange(1_000) for _ in range(512)]
            self._scheduler.add_request(
                build_request(f"decode-{number}", prompt, max_tokens=100_000)
            )
        for _ in range(DECODING * 512 // 8_192 + 4):
            self._step()

    def __call__(self) -> float:
        return sum(self._step() for _ in range(STEPS_PER_SECTION))

    def _step(self) -> float:
        start = clock()
        output = self._scheduler.schedule()
        scheduled = clock()
        requests = self._scheduler.requests
        ids = list(output.num_scheduled_tokens)
        sampled = [
            [SAMPLED_TOKEN] if requests[i].num_computed_tokens >= requests[i].num_tokens else []
            for i in ids
        ]
        answer = model_output(ids, sampled)
        resumed = clock()
        self._scheduler.update_from_output(output, answer)
        return clock() - resumed + scheduled - start
