"""The README says what the code says."""

from pathlib import Path

from vllm_agent_hint.cli.flags import flags_table

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_flags_in_the_readme_are_those_of_the_settings() -> None:
    assert flags_table() in README.read_text()
