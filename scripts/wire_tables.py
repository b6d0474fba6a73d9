"""Write the tables of docs/wire.md from the models that validate the wire.

    .venv/bin/python scripts/wire_tables.py

Each table stands between ``<!-- MODEL -->`` and ``<!-- end -->``. tests/unit/test_readme.py fails
where the page and the models differ.
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from vllm_agent_hint import hints
from vllm_agent_hint.frontend import rest_models

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "wire.md"
_TABLE: Final = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)
_INT32: Final = 2**31
_OR_NULL: Final = " or null"
_ANSWERS: Final = (hints.EditResult, hints.RetentionResult, rest_models._Told)


def with_tables(page: str) -> str:
    """The page with each table as its model has it now."""

    def fresh(found: re.Match[str]) -> str:
        name = found[1]
        model = getattr(hints, name, None) or getattr(rest_models, name)
        return f"<!-- {name} -->\n{table(model)}\n<!-- end -->"

    return _TABLE.sub(fresh, page)


def tables_in(page: str) -> list[str]:
    """The models that have a table."""
    return [found[1] for found in _TABLE.finditer(page)]


def table(model: type[BaseModel]) -> str:
    """Markdown: name, type with its bounds, and meaning of each field; defaults of what is sent."""
    schema = model.model_json_schema()
    said = _meanings(model)
    is_answer = issubclass(model, _ANSWERS)
    rows = ["| field | type | meaning |" if is_answer else "| field | type | default | meaning |"]
    rows.append(re.sub(r"[^|]+", "---", rows[0]))
    for name, field in schema["properties"].items():
        cells = [f"`{name}`", _type(field, schema)]
        if not is_answer:
            cells[1] = cells[1].removesuffix(_OR_NULL)
            cells.append(_default(model, name))
        rows.append(f"| {' | '.join([*cells, _description(field) or said.get(name, '')])} |")
    return "\n".join(rows)


def _default(model: type[BaseModel], name: str) -> str:
    field = model.model_fields[name]
    return (
        "required"
        if field.is_required()
        else json.dumps(field.get_default(call_default_factory=True))
    )


def _description(field: dict[str, Any]) -> str:
    inside = [option.get("description", "") for option in field.get("anyOf", ())]
    description: str = field.get("description") or "".join(inside)
    return description


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """In JSON's own words, with the bounds."""
    if "anyOf" in field:
        return " or ".join(_type(option, schema) for option in field["anyOf"])
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        target = schema["$defs"][name]
        return " / ".join(f"`{v}`" for v in target["enum"]) if "enum" in target else name
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " / ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type", "any")
    if kind == "array":
        most = f"up to {field['maxItems']} " if "maxItems" in field else ""
        return f"array: {most}{_type(field['items'], schema)}"
    return kind + _bounds(field)


def _bounds(field: dict[str, Any]) -> str:
    low = field.get("minimum", field.get("minLength"))
    high = field.get("maximum", field.get("maxLength"))
    unit = " characters" if "minLength" in field or "maxLength" in field else ""
    if field.get("exclusiveMaximum") == _INT32:
        return f", {low:g} or more"
    if low is not None and high is not None:
        return f", {low:g} to {high:g}{unit}"
    if low is not None:
        return f", {low:g} or more{unit}"
    return ""


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """What the ``Args`` of a docstring say, by name."""
    _, _, args = (inspect.getdoc(model) or "").partition("Args:\n")
    meanings: dict[str, str] = {}
    name = ""
    for line in args.splitlines():
        begins = re.match(r"    (\w+): (.*)", line)
        if begins:
            name, meanings[begins[1]] = begins[1], begins[2]
        elif name and line.strip():
            meanings[name] += " " + line.strip()
    return {name: _as_markdown(text) for name, text in meanings.items()}


def _as_markdown(text: str) -> str:
    return text.replace("``", "`").replace("`True`", "`true`").replace("`False`", "`false`")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
