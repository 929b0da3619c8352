"""Correct ways to communicate have to pass on gangs of the CPU; `tests/patterns` has them."""

from __future__ import annotations

from pathlib import Path

from gang_suite import Suite

PATTERNS = Path(__file__).parents[3] / "patterns"


def test_correct_communication_passes_on_two_to_four_ranks(tmp_path: Path) -> None:
    suite = Suite(tmp_path)
    run = suite.run(
        "-v",
        "--ranks=4",
        "--device=cpu",
        "--rank-timeout=60",
        f"--run-dir={tmp_path / 'run'}",
        str(PATTERNS),
    )
    words = run.words
    assert {name: word for name, word in words.items() if word not in ("PASSED", "SKIPPED")} == {}
    sizes = {name.partition("[world")[2][:1] for name in words if "[world" in name}
    assert sizes == {"2", "3", "4"}
    skipped = {name.partition("[")[0] for name, word in words.items() if word == "SKIPPED"}
    assert skipped == {"test_stages_of_megatron"}
    assert run.returncode == 0, run.stdout
