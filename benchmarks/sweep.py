"""Chooses the defaults of the policy: one knob at a time, everything else as it is by default.

    python benchmarks/sweep.py AGENTS_TRACE CHATS_TRACE OUT_FOLDER [SEED ...]

Plays the agents beside half of the chats, on seeds of its own (1 unless others are given), and
writes ``sweep.json`` and ``sweep.svg``: how much of the way from stock to the optimum each value
closes. What the defaults are worth is measured on other seeds; see README.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SIZES = (2_000_000, 4_000_000)
KNOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("hints", "", ("",)),
    ("hints:leased", "", ("",)),
    ("hints:deadline", "", ("",)),
    ("hints:lru", "", ("",)),
    ("hints", "PROTECTED_SHARE", ("0.8", "0.9")),
    ("hints", "EXPIRED_ENTERS", ("front",)),
    ("hints", "SUPERSEDED_ENTERS", ("back",)),
    ("hints", "CONVERSATIONS", ("0",)),
    ("auto", "CONVERSATIONS", ("0",)),
    ("auto", "ASSOCIATED_SECONDS", ("60", "120", "300", "600", "1800")),
)


def replay(traces: list[str], policies: str, seeds: str, flags: dict[str, str]) -> list[dict]:
    out = Path("sweep-part.json")
    command = ["vllm-agent-hint", "bench", "replay", "--share", "0.5", "--users", "32"]
    command += [part for trace in traces for part in ("--trace", trace)]
    command += ["--cache-tokens", ",".join(map(str, SIZES)), "--policy", policies]
    command += ["--seed", seeds, "--jobs", "1", "--json", str(out)]
    subprocess.run(command, check=True, env=os.environ | flags)
    runs = json.loads(out.read_text())["runs"]
    out.unlink()
    return runs


def main(agents: str, chats: str, folder: Path, seeds: str) -> None:
    traces = [agents, chats]
    frame = replay(traces, "stock,min", seeds, {})
    bounds = {(r["seed"], r["cache_tokens"], r["policy"]): r["hit_share"] for r in frame}
    rows = []
    for policy, flag, values in KNOBS:
        for value in values:
            flags = {f"VLLM_AGENT_HINT_{flag}": value} if flag else {}
            for run in replay(traces, policy, seeds, flags):
                where = run["seed"], run["cache_tokens"]
                stock, best = bounds[*where, "stock"], bounds[*where, "min"]
                name = f"{policy} {flag}={value}" if flag else policy
                rows.append(
                    {
                        "knob": name,
                        "seed": run["seed"],
                        "cache_tokens": run["cache_tokens"],
                        "hit_share": run["hit_share"],
                        "over_stock": run["hit_share"] - stock,
                        "gap_closed": (run["hit_share"] - stock) / (best - stock),
                    }
                )
                print(rows[-1], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps({"bounds": frame, "rows": rows}, indent=1) + "\n")
    plot(rows, folder / "sweep.svg")


def plot(rows: list[dict], file: Path) -> None:
    names = list(dict.fromkeys(row["knob"] for row in rows))
    figure, axes = plt.subplots(1, len(SIZES), figsize=(11, 4.2), sharey=True)
    for axis, size in zip(axes, SIZES, strict=True):
        means = []
        for name in names:
            found = [
                100 * r["gap_closed"]
                for r in rows
                if r["knob"] == name and r["cache_tokens"] == size
            ]
            means.append(sum(found) / len(found))
        axis.barh(names, means, color=["#b04a3a" if mean < 0 else "#3a6ea5" for mean in means])
        axis.set_title(f"{size / 1e6:g}M tokens of cache")
        axis.set_xlabel("% of the way from stock to the optimum")
        axis.axvline(0, color="black", linewidth=0.8)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), ",".join(sys.argv[4:]) or "1")
