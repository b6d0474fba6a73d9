"""The report for a terminal: a table per load, and below it in words what it says."""

import math

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_agent_hint.cli.bench.serve.figures import FIGURES, SCOPE_TITLES, Figure
from vllm_agent_hint.cli.bench.serve.interval import METHOD, Interval
from vllm_agent_hint.cli.bench.serve.result import ArmResult, LoadResult, Loss, losses
from vllm_agent_hint.cli.bench.serve.verdict import Finding, Outcome

_STYLES = {
    Outcome.MET: "green",
    Outcome.NOT_MET: "bold red",
    Outcome.NOT_MEASURED: "yellow",
}


def load_table(result: LoadResult) -> Table:
    """Means over the repetitions; below each its spread, and its ratio to the reference."""
    repetitions = len(result.arms[0].plays)
    table = Table(
        title=f"{result.load}, {repetitions} repetitions", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("", no_wrap=True)
    for arm in result.arms:
        table.add_column(arm.arm.name, justify="right", overflow="fold")
    scope = ""
    for figure in FIGURES:
        if not any(arm.values(figure.key) for arm in result.arms):
            continue
        if figure.scope != scope:
            scope = figure.scope
            table.add_section()
            table.add_row(Text(SCOPE_TITLES[scope], style="bold"))
        table.add_row(f"  {figure.title}", *(_cell(result, arm, figure) for arm in result.arms))
    return table


def _cell(result: LoadResult, arm: ArmResult, figure: Figure) -> Text:
    mean, spread = arm.mean(figure.key), arm.spread(figure.key)
    if mean is None:
        return Text("-", "dim")
    cell = Text(figure.show(mean))
    if spread is not None:
        cell.append(f" ±{figure.show(spread)}", "dim")
    if arm.arm.name != result.reference:
        interval = result.compare(figure, arm.arm.name)
        if interval is not None:
            cell.append(f"\n{short(figure, interval)}", "cyan")
    return cell


def short(figure: Figure, interval: Interval) -> str:
    """Such as ``x0.41 [0.40, 0.42]``, or ``+12.0 [+10.9, +13.2]`` in points of a share."""
    if figure.is_share:
        text = f"{100 * interval.value:+.1f}"
        ends = f" [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
    else:
        text = f"x{interval.value:.2f}"
        ends = f" [{interval.low:.2f}, {interval.high:.2f}]"
    return text if math.isinf(interval.half_width) else text + ends


def words_below(result: LoadResult, findings: list[Finding]) -> Group:
    """Legend, notes, verdict and losses."""
    lines = [Text(result.told)]
    lines += [Text(note, "yellow") for note in result.notes]
    lines += [Text(f"{arm.arm.name}: {arm.arm.meaning}", "dim") for arm in result.arms]
    same = "the same" if result.same_prompts else "NOT all the same: greedy answers differed"
    lines.append(Text(f"prompts of a repetition's arms: {same}; intervals: {METHOD}", "dim"))
    lines.append(Text())
    for finding in findings:
        mark = Text(f"{finding.outcome:<13}", _STYLES[finding.outcome])
        lines.append(mark.append(finding.text, "default"))
    lost = losses(result)
    lines += [Text(loss_in_words(result, loss), "red") for loss in lost]
    if lost:
        lines.append(Text("One figure in forty is among the losses by chance alone.", "dim"))
    else:
        lines.append(Text(f"No arm loses to {result.reference} beyond its interval."))
    return Group(*lines)


def loss_in_words(result: LoadResult, loss: Loss) -> str:
    return (
        f"{loss.arm} loses: {SCOPE_TITLES[loss.figure.scope]}, {loss.figure.title}: "
        f"{short(loss.figure, loss.interval)} by {result.reference}"
    )
