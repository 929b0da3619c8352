"""Hosts that lack something: what can work there does, and the rest is one error."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from gang_suite import Suite
from labs import wait_until

pytestmark = pytest.mark.nightly

TESTS = """
    import torch
    import torch.distributed as dist


    def test_adds_up(process_group):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
"""


def command_in(suite: Suite, namespaces: Sequence[str], first: str) -> list[str]:
    """Return pytest's command line in namespaces of its own, where it may have them."""
    inside = ["unshare", *namespaces, "sh", "-c", f'{first} && exec "$@"', "sh"]
    try:
        done = subprocess.run([*inside, "true"], check=False, capture_output=True)
    except OSError:
        pytest.skip("there is no unshare")
    if done.returncode:
        pytest.skip(f"no such namespace: {done.stderr.decode().strip()}")
    return [*inside, *suite.command()]


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path).write(test_sum=TESTS)


@pytest.mark.parametrize("more", [[], ["-n", "1"]])
def test_a_host_without_loopback_is_one_error(more: list[str], suite: Suite) -> None:
    run = suite.run("--ranks", "2", *more, command=command_in(suite, ["-n"], "true"))
    assert run.returncode == 4
    assert run.stderr == (
        "ERROR: network: processes of this host cannot reach one another by 127.0.0.1, and ranks "
        "have no other way to meet; bring the loopback interface up: ip link set lo up\n\n"
    )


def test_a_host_without_proc_is_one_error(suite: Suite) -> None:
    command = command_in(suite, ["-m"], "mount -t tmpfs none /proc")
    run = suite.run("--ranks", "2", command=command)
    assert run.returncode == 4
    assert run.stderr == (
        "ERROR: /proc: is not mounted, and processes of ranks are found by it; "
        "mount it: mount -t proc proc /proc\n\n"
    )


def test_a_proc_of_another_namespace_is_one_error(suite: Suite) -> None:
    run = suite.run("--ranks", "2", command=command_in(suite, ["-p", "-f"], "true"))
    assert run.returncode == 4
    assert run.stderr.startswith("ERROR: /proc: is of another PID namespace, and processes of")


ENVIRONMENTS = {
    "no home, plain language, no bytecode, private files, few descriptors": (
        "unset HOME; export LANG=C LC_ALL=C PYTHONDONTWRITEBYTECODE=1; umask 077; ulimit -n 64"
    ),
    "a home that is not there, few variables, options in one of them, a safe path, optimised": (
        'exec env -i PATH="$PATH" GANG_SUITE="$GANG_SUITE" HOME=/nowhere PYTHONSAFEPATH=1 '
        'PYTHONOPTIMIZE=1 PYTEST_ADDOPTS="-p no:cacheprovider" "$@" -o addopts=-q'
    ),
}
ORDINARY = """
    import os
    import sys

    import pytest

    from helper import double


    def test_writes(rank, tmp_path, shared_tmp_path):
        (tmp_path / "\u00fc").write_text(str(rank), encoding="utf-8")
        if double(2) != 4:
            pytest.fail("wrong")


    def test_prints(capfd):
        os.write(1, "\u00fc".encode())
        if capfd.readouterr().out != "\u00fc":
            pytest.fail("wrong")


    def test_fails(rank):
        if rank == 1:
            raise ValueError("known")
"""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_ordinary_tests_have_their_outcomes_in_any_environment(name: str, tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(
        helper="def double(number): return 2 * number", test_ordinary=ORDINARY, conftest=""
    )
    is_optimised = "optimised" in name
    if not is_optimised:  # all of torch would be compiled once more
        suite.write(test_sum=TESTS)
    shell = ["sh", "-c", f'{ENVIRONMENTS[name]}; exec "$@"', "sh"]
    run = suite.run("--ranks", "2", "-v", command=[*shell, *suite.command()])
    summary = run.summary.removesuffix(", 1 warning")  # pytest's own where it is optimised
    passed = f"1 failed, {2 if is_optimised else 3} passed"
    assert (run.returncode, summary) == (1, passed), run.stdout + run.stderr
    assert "[rank 1] ValueError: known" in run.stdout
    assert "/pytest_megatron/" not in run.stdout + run.stderr  # no frame of ours


def test_a_session_whose_output_cannot_be_written_leaves_nothing(suite: Suite) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            suite.command("--ranks", "2"),
            cwd=suite.root,
            env=suite.env(PYTHONUNBUFFERED="1"),  # else Python's own exit code is 120
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: [Errno 28] No space left on device\n")
    assert "/pytest_megatron/" not in done.stderr  # as plain pytest ends
    wait_until(lambda: not suite.processes(), "no process is left")
