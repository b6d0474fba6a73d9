"""Edits beside LMCache's own ``LMCacheConnectorV1``, in a process of its own: prints the results.

Importing LMCache changes more of a process than other tests could bear.
"""

import json

from vllm.config import KVTransferConfig

from tests.engine.rig import Engine, hinted, make_scheduler, prompt


def main() -> None:
    config = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both")
    scheduler = make_scheduler(plugged=True, num_blocks=40, kv_transfer_config=config)
    engine = Engine(scheduler)
    hits = [engine.serve(prompt(1, 64), hint=hinted("a", 60.0)) for _ in range(2)]
    edits = [{"type": "offload"}, {"type": "prefetch"}, {"type": "evict"}]
    answer = engine.call("edit", session_id="a", edits=edits)
    print(json.dumps({"hits": hits, "results": answer["results"]}))


if __name__ == "__main__":
    main()
