from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.workloads.training.run.runner import tail, traceback_at

RAISED = """\
+ python train.py
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 12, in <module>
[rank1]:     main()
[rank1]: ValueError: no
+ exit 1
"""
STACK = """\
starting
Fatal Python error: Segmentation fault

Current thread 0x00007f664dc95b80 (most recent call first):
  File "train.py", line 95 in do

Extension modules: numpy (total: 1)
+ exit 1
"""
MIXED = """\
Traceback (most recent call last):
iteration 1/ 10
ValueError: no
"""


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        pytest.param(RAISED, 5, (2, 5), id="one that ends there"),
        pytest.param(STACK, 2, (2, 5), id="a stack that begins there"),
        pytest.param(MIXED, 3, None, id="lines of others between"),
        pytest.param(STACK, 1, None, id="neither"),
        pytest.param("", 9, None, id="no such line"),
    ],
)
def test_the_traceback_at_a_line_is_shown_without_what_surrounds_it(
    tmp_path: Path, text: str, number: int, expected: tuple[int, int] | None
) -> None:
    (tmp_path / "log").write_text(text)
    lines = [line.removeprefix("[rank1]: ") for line in text.splitlines()]
    shown = () if expected is None else tuple(filter(None, lines[expected[0] - 1 : expected[1]]))
    assert traceback_at(tmp_path / "log", number) == shown
    assert traceback_at(tmp_path / "none", number) == ()


def test_the_tail_of_a_log_without_a_traceback_is_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"line {n}" for n in range(100_000)) + "\n\n")
    assert tail(tmp_path / "log") == tuple(f"line {n}" for n in range(99_990, 100_000))
    assert tail(tmp_path / "none") == ()


def test_a_long_traceback_keeps_its_ends(tmp_path: Path) -> None:
    frames = "".join(f'  File "a.py", line {n}, in f\n' for n in range(100))
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\n{frames}KeyError: 1\n")
    lines = tail(tmp_path / "log")
    assert len(lines) == 30
    assert (lines[2], lines[-1]) == ("  ...", "KeyError: 1")
