"""Write the history of a flaky test, and of one that was repaired in quarantine, to the project."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_megatron.runs.history import HistoryEntry, append

_FIRST = HistoryEntry(
    time="",
    run="",
    node_id="",
    kind="test",
    verdict="passed",
    num_attempts=1,
    causes=(),
    duration_s=2.0,
    commit=None,
    is_dirty=False,
    platform="cuda x8",
)
_ITEMS = {  # item -> outcome of each run, whose quarantine began at the tenth
    "tests/test_exchange.py::test_ring": "." * 9 + "F" + "...F" + "." * 5 + "F" + "....",
    "tests/test_exchange.py::test_halo": ".F" * 5 + "." * 40,
}


def main() -> None:
    """Write the files into the current directory."""
    Path("tests").mkdir(exist_ok=True)
    Path("tests/test_exchange.py").write_text("def test_ring(): ...\n", encoding="utf-8")
    Path("CODEOWNERS").write_text("tests/ @org/comm\n", encoding="utf-8")
    with Path("pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n[tool.pytest-megatron.quarantine]\n")
        file.write('"tests/test_exchange.py::test_halo" = { reason = "#12", until = 2027-01-01 }\n')
    entries = [
        replace(
            _FIRST,
            node_id=node_id,
            time=f"2026-11-{number // 2 + 1:02}T0{number % 2}:00:00Z",
            run=f"run-{number}",
            commit=f"{number // 2 + 10:02x}" * 20,
            verdict="failed" if outcome == "F" else "passed",
            quarantined_until="2027-01-01" if number >= 10 and "halo" in node_id else "",
        )
        for node_id, outcomes in _ITEMS.items()
        for number, outcome in enumerate(outcomes)
    ]
    append(Path(".pytest_megatron/history.jsonl"), entries)


if __name__ == "__main__":
    main()
