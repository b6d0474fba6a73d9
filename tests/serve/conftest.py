"""Fixtures that start real vLLM servers.

    def test_something(serve):
        server = serve("qwen3-small", ["--num-gpu-blocks-override", "64"], {"VLLM_AGENT_HINT": "0"})
        assert server.complete(tokens(1000)).cached_tokens == 0

``serve`` stops its servers when the test ends, ``serve_module`` when the module does, for tests
that can share one. Both fork; ``serve_in_full`` starts ``vllm serve`` from nothing.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.serve.mooncake_rig import MooncakeMaster, mooncake_master, why_no_mooncake
from tests.serve.rig import MAX_MODEL_LEN, ForkLauncher, Serve, TestServer, forked_server
from vllm_agent_hint.cli.demo.server import running_server, server_environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.serve)


@pytest.fixture(scope="session")
def environment(scratch: Path) -> dict[str, str]:
    return server_environment(scratch / "vllm-cache", on_gpu=False)


@pytest.fixture(scope="session")
def launcher(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForkLauncher]:
    launcher = ForkLauncher(environment, tmp_path_factory.mktemp("launcher") / "launcher.log")
    yield launcher
    launcher.close()


@pytest.fixture
def serve(
    request: pytest.FixtureRequest, model: Callable[[str], Path], logs: Path
) -> Iterator[Serve]:
    """Forked servers that end with the test."""
    with ExitStack() as running:
        yield _factory(request, running, model, logs)


@pytest.fixture(scope="module")
def serve_module(
    request: pytest.FixtureRequest, model: Callable[[str], Path], logs: Path
) -> Iterator[Serve]:
    """Forked servers that end with the module."""
    with ExitStack() as running:
        yield _factory(request, running, model, logs)


@pytest.fixture
def serve_in_full(
    model: Callable[[str], Path], logs: Path, environment: dict[str, str]
) -> Iterator[Serve]:
    """``vllm serve`` processes of their own (15 s each) that end with the test."""
    counter = itertools.count()

    def start(kind: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None):  # type: ignore[no-untyped-def]
        log = logs / f"full-{next(counter)}.log"
        everything = {**environment, **(env or {})}
        server = running.enter_context(
            running_server(model(kind), log, everything, _with_defaults(args))
        )
        return TestServer(server, is_alive=lambda: True, stop=running.close)

    with ExitStack() as running:
        yield start


@pytest.fixture
def mooncake(tmp_path: Path) -> Iterator[MooncakeMaster]:
    """The environment of servers that use a Mooncake master of the test's own, and its process."""
    if reason := why_no_mooncake():
        pytest.skip(reason)
    with mooncake_master(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


def _factory(
    request: pytest.FixtureRequest,
    running: ExitStack,
    model: Callable[[str], Path],
    logs: Path,
) -> Serve:
    counter = itertools.count()
    name = re.sub(r"\W+", "_", request.node.name)

    def start(
        kind: str = "qwen3-small",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> TestServer:
        launcher: ForkLauncher = request.getfixturevalue("launcher")
        log = logs / f"{name}-{next(counter)}.log"
        return running.enter_context(
            forked_server(launcher, model(kind), log, env or {}, _with_defaults(args))
        )

    return start


def _with_defaults(args: Sequence[str]) -> list[str]:
    if "--max-model-len" in args:
        return list(args)
    return ["--max-model-len", str(MAX_MODEL_LEN), *args]
