from __future__ import annotations

import json
from pathlib import Path

import pytest_megatron
from pytest_megatron.gangs.crash import (
    describe_flights,
    innermost_frame,
    shorten_stack,
)

PACKAGE = Path(pytest_megatron.__file__).parent

# As faulthandler writes it: other threads first, the most recent call on top.
STACK = """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/srv/suite/background.py", line 5 in run

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in wait
  File "/srv/suite/test_moe.py", line 14 in test_dispatch
  File "/venv/lib/python3.11/site-packages/_pytest/python.py", line 159 in pytest_pyfunc_call
  File "/venv/lib/python3.11/site-packages/pluggy/_callers.py", line 121 in _multicall
  File "/srv/pytest_megatron/gangs/rank/plugin.py", line 85 in run_item
  File "/srv/suite/conftest.py", line 3 in go
"""


def test_the_innermost_frame_is_the_tests_own_in_the_main_thread() -> None:
    assert innermost_frame(STACK) == "test_moe.py:14 in test_dispatch"


def test_without_a_frame_of_its_own_a_rank_is_in_the_library() -> None:
    stack = 'Current thread 0x1:\n  File "/usr/lib/python3.11/selectors.py", line 4 in select\n'
    assert innermost_frame(stack) == "selectors.py:4 in select"
    assert innermost_frame("") is None


def test_a_test_of_a_library_is_not_in_the_program_that_started_pytest() -> None:
    """As a class of `torch.testing` that waits for its processes."""
    stack = """\
Current thread 0x1 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/testing/common.py", line 7 in _join_processes
  File "/venv/lib/python3.11/site-packages/_pytest/unittest.py", line 408 in runtest
  File "/srv/pytest_megatron/process/tree.py", line 112 in run_guarded
  File "/srv/bin/pytest", line 8 in <module>
"""
    assert innermost_frame(stack) == "common.py:7 in _join_processes"


def test_a_hang_is_never_in_our_own_code() -> None:
    """Whatever the folders of the package are called: in the fixture, or below a call of torch."""
    torch = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    pytests = '  File "/venv/lib/python3.11/site-packages/_pytest/fixtures.py", line 9 in call'
    for ours in sorted(PACKAGE.rglob("*.py")):
        inside = f'  File "{ours}", line 5 in open'
        lines = ["Current thread 0x1:", f'  File "{torch}", line 4 in wait', inside, pytests]
        assert innermost_frame("\n".join(lines)) == "distributed_c10d.py:4 in wait"
        lines[3:] = ['  File "/srv/pytest_megatron/tests/test_a.py", line 6 in test_a', pytests]
        assert innermost_frame("\n".join(lines)) == "test_a.py:6 in test_a"


def test_a_stack_is_cut_where_pytest_begins() -> None:
    assert (
        shorten_stack(STACK)
        == """\
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/srv/suite/background.py", line 5 in run

Current thread 0x00007f02 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in wait
  File "/srv/suite/test_moe.py", line 14 in test_dispatch
  ..."""
    )


def flight(*collectives: tuple[int, str, str]) -> str:
    entries = [
        {
            "record_id": record,
            "collective_seq_id": number,
            "process_group": ["0", "a name"],
            "profiling_name": f"nccl:{name}",
            "state": state,
            "input_sizes": [[4]],
        }
        for record, (number, name, state) in enumerate(collectives)
    ]
    return json.dumps({"version": "2.9", "pg_config": {}, "entries": entries})


def test_the_last_collectives_of_each_rank_are_named() -> None:
    first = (1, "all_reduce", "completed")
    stuck = flight(first, (2, "all_gather", "started"))
    assert (
        describe_flights({0: stuck, 1: flight(first), 2: flight(*[first] * 4)})
        == """\
rank 0: all_reduce, collective 1 of group 0 (a name), completed, input [[4]]
rank 0: all_gather, collective 2 of group 0 (a name), started, input [[4]]
rank 1: all_reduce, collective 1 of group 0 (a name), completed, input [[4]]
rank 2: all_reduce, collective 1 of group 0 (a name), completed, input [[4]]
rank 2: all_reduce, collective 1 of group 0 (a name), completed, input [[4]]
rank 2: all_reduce, collective 1 of group 0 (a name), completed, input [[4]]"""
    )


def test_records_that_cannot_be_read_say_nothing() -> None:
    assert describe_flights({0: "{}", 1: "not json", 2: "[]", 3: '{"entries": [1]}'}) == ""
    odd = ['{"entries": 5}', '{"entries": [{"seq_id": "x"}]}', '{"pg_config": [1]}', "[" * 100_000]
    assert describe_flights(dict(enumerate(odd))) == ""
