"""The table of flags in the README, made from ``settings.py`` so that it can't drift."""

from annotated_types import Ge, Gt, Le, MaxLen

from vllm_agent_hint.settings import Settings, flag_names


def flags_table() -> str:
    """Markdown: name, default, bounds and meaning of every flag."""
    lines = ["| variable | default | bounds | meaning |", "|---|---|---|---|"]
    for variable, field in zip(flag_names(), Settings.model_fields.values(), strict=True):
        default = field.default
        if isinstance(default, bool):
            shown = str(int(default))
        else:
            shown = str(getattr(default, "value", default))
        lines.append(f"| `{variable}` | {shown} | {_bounds(field)} | {field.description} |")
    return "\n".join(lines)


def _bounds(field: object) -> str:
    """What a value out of bounds does is the same everywhere: the plugin stays off and says so."""
    low = high = ""
    for rule in getattr(field, "metadata", ()):
        if isinstance(rule, Ge):
            low = f"{rule.ge}"
        elif isinstance(rule, Gt):
            low = f"above {rule.gt}"
        elif isinstance(rule, Le):
            high = f"{rule.le}"
        elif isinstance(rule, MaxLen):
            return f"up to {rule.max_length} characters"
    if low and high:
        return f"{low} to {high}"
    annotation = getattr(field, "annotation", None)
    members = getattr(annotation, "__members__", None)
    if members:
        return ", ".join(member.value for member in members.values())
    return "0, 1" if annotation is bool else "any text"
