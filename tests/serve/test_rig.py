"""The rig itself: what the other tests stand on."""

from tests.serve.rig import Serve, tokens

STOCK = {"VLLM_AGENT_HINT": "0"}
BLOCK = 128


def test_a_forked_server_answers_and_its_repeats_hit_the_cache(serve: Serve) -> None:
    server = serve("qwen3-small", ["--num-gpu-blocks-override", "96"], STOCK)
    first, again = server.complete(tokens(1000)), server.complete(tokens(1000))
    assert (first.cached_tokens, again.cached_tokens) == (0, 7 * BLOCK)
    assert first.token_ids == again.token_ids
    assert server.metrics()["vllm:prefix_cache_hits_total"] == 7 * BLOCK


def test_prompts_of_another_seed_share_no_block(serve: Serve) -> None:
    server = serve("qwen3-small", ["--num-gpu-blocks-override", "96"], STOCK)
    server.complete(tokens(1000, seed=1))
    assert server.complete(tokens(1000, seed=2)).cached_tokens == 0


def test_a_hybrid_server_hits_at_the_prompts_own_end(serve: Serve) -> None:
    server = serve("qwen3next", ["--num-gpu-blocks-override", "128"], STOCK)
    server.complete(tokens(3000))
    assert server.complete(tokens(3000)).cached_tokens == 23 * BLOCK


def test_a_server_in_full_answers_and_its_repeats_hit_the_cache(serve_in_full: Serve) -> None:
    server = serve_in_full("qwen3-small", ["--num-gpu-blocks-override", "96"], STOCK)
    first, again = server.complete(tokens(1000)), server.complete(tokens(1000))
    assert (first.cached_tokens, again.cached_tokens) == (0, 7 * BLOCK)
    assert first.token_ids == again.token_ids
