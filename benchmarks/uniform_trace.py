"""Writes a trace in which nothing can be known: sessions come back in uniformly random order.

    python benchmarks/uniform_trace.py > uniform.jsonl

It is long because chance is all that tells policies apart: with 150,000 requests the hit share of
one still wanders by a tenth of a point. A context does not grow, and no turn says how it ended. No
order of giving way is better than another here, so a policy that falls behind stock does harm.
"""

import json
import random

SESSIONS = 100
REQUESTS = 150_000
BLOCKS = 8
BLOCK_SIZE = 64
SECONDS_BETWEEN = 2.0


def main() -> None:
    dice = random.Random(1)
    print(json.dumps({"format": "vllm-agent-hint-trace", "version": 1, "block_size": BLOCK_SIZE}))
    for number in range(REQUESTS):
        session = dice.randrange(SESSIONS)
        print(
            json.dumps(
                {
                    "t": round(number * SECONDS_BETWEEN + dice.random(), 3),
                    "session": f"s{session}",
                    "in": BLOCKS * BLOCK_SIZE + 7,
                    "out": 32,
                    "runs": [session * BLOCKS, BLOCKS],
                }
            )
        )


if __name__ == "__main__":
    main()
