"""Fetches the vendors' stores that the pooling tests drive, into ``.venv/stores``.

Run by ``make stores``, and by ``make test``, which skips their tests where they can't be had. They
have no place in the environment itself: each pulls versions of its own along.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
STORES: Final = CHECKOUT / ".venv" / "stores"
PYTHON: Final = CHECKOUT / ".venv" / "bin" / "python"

MOONCAKE: Final = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
MOONCAKE_LIBRARIES: Final = (
    "libibverbs1",
    "librdmacm1",
    "libnuma1",
    "libnl-3-200",
    "libnl-route-3-200",
)
"""Debian's; it links against them also where it speaks TCP only."""
LMCACHE: Final = (
    "lmcache==0.5.6",
    "sortedcontainers",
    "aiofiles",
    "aiofile",
    "caio",
    "redis",
    "nvtx",
)
ASCEND: Final = "vllm-ascend==0.23.0.post1"


def main() -> None:
    failed = [
        name
        for name, fetch in (
            ("mooncake", lambda: install("mooncake", MOONCAKE)),
            ("libraries of mooncake", unpack_libraries),
            ("lmcache", lambda: install("lmcache", LMCACHE)),
            ("vllm-ascend", unpack_ascend),
        )
        if not fetch()
    ]
    if failed:
        sys.exit(f"not to be had, so that their tests are skipped: {', '.join(failed)}")
    print(f"stores are in {STORES.relative_to(CHECKOUT)}")


def install(name: str, packages: tuple[str, ...]) -> bool:
    target, part = STORES / name, STORES / f"{name}.part"
    if target.exists():
        return True
    shutil.rmtree(part, ignore_errors=True)
    if not run([PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--target", part, *packages]):
        return False
    part.rename(target)
    return True


def unpack_libraries() -> bool:
    target = STORES / "libraries"
    if target.exists():
        return True
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return False
    archives = STORES / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    part = STORES / "libraries.part"
    if not run(["apt-get", "download", "-q", *MOONCAKE_LIBRARIES], cwd=archives):
        return False
    if not all(run(["dpkg", "-x", archive, part]) for archive in sorted(archives.glob("*.deb"))):
        return False
    part.rename(target)
    return True


def unpack_ascend() -> bool:
    """Its source is enough: its scheduler side is Python, and its wheels are for its own chips."""
    target = STORES / "ascend"
    if target.exists():
        return True
    archives = STORES / "archives"
    tools = STORES / "build-tools"
    wanted = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", archives, ASCEND]
    # To hand the source out, pip asks it for its name first, and that it says for a chip only.
    environment = {**os.environ, "PYTHONPATH": str(tools), "SOC_VERSION": "ascend910b1"}
    fetched = run(
        [PYTHON, "-m", "pip", "install", "-q", "--target", tools, "setuptools", "setuptools_scm"]
    ) and run([PYTHON, "-m", "pip", "download", "-q", *wanted], environment=environment)
    if not fetched:
        return False
    with tarfile.open(next(archives.glob("vllm_ascend-*.tar.gz"))) as archive:
        archive.extractall(STORES / "unpacked", filter="data")
    next((STORES / "unpacked").iterdir()).rename(target)
    return True


def run(
    command: list[str | Path],
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
) -> bool:
    return subprocess.run(command, cwd=cwd, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    main()
