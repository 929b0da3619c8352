"""What a test leaves behind in its rank: put back, or the gang is replaced; the test is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gang_suite import Suite

SUITE = """
    import gc
    import os
    import weakref

    import pytest
    import torch
    import torch.distributed as dist


    @pytest.fixture
    def is_fine(process_group, rank, world_size, tmp_path):
        assert os.environ["RANK"] == str(rank)
        assert os.environ["MASTER_PORT"]
        assert (process_group.size(), dist.get_backend()) == (world_size, "gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        assert int(value) == world_size
        with open(tmp_path / "x", "w"):
            pass
        return os.path.samefile(os.getcwd(), os.environ["GANG_SUITE"])


    def replace_group(backend="gloo", **settings):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend, **settings)


    def test_a_leaves_a_small_group(process_group):
        dist.barrier()
        replace_group(store=dist.HashStore(), rank=0, world_size=1)


    def test_b(is_fine):
        assert is_fine


    def test_c_leaves_another_backend(process_group, rank, world_size):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        replace_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


    def test_d(is_fine):
        assert is_fine


    def test_e_leaves_a_small_group_on_one_rank(process_group, rank):
        dist.destroy_process_group()
        if rank == 0:
            replace_group(store=dist.HashStore(), rank=0, world_size=1)


    def test_f(is_fine):
        assert is_fine


    def test_g_leaves_another_directory(tmp_path):
        os.chdir(tmp_path)
        os.rmdir(tmp_path)


    def test_h(is_fine):
        assert is_fine


    def test_i_leaves_variables():
        os.environ.pop("MASTER_PORT")
        os.environ["RANK"] = "7"


    def test_j(is_fine):
        assert is_fine


    def test_k_leaves_no_variables():
        os.environ = {}


    def test_l(is_fine):
        assert is_fine


    def test_o_destroys_the_group(process_group):
        dist.destroy_process_group()


    def test_p(is_fine):
        assert is_fine


    class TestOwnWorld:
        @pytest.fixture(scope="class", autouse=True)
        def single(self, tmp_path_factory):
            before, port = os.getcwd(), os.environ["MASTER_PORT"]
            os.chdir(tmp_path_factory.mktemp("class"))
            os.environ["MASTER_PORT"] = "1"
            replace_group(store=dist.HashStore(), rank=0, world_size=1)
            yield
            dist.destroy_process_group()
            os.environ["MASTER_PORT"] = port
            os.chdir(before)

        def test_q(self, process_group):
            assert process_group.size() == 1

        def test_r_leaves_a_variable_too(self):
            os.environ["RANK"] = "8"

        def test_s(self, process_group, rank):
            assert (process_group.size(), os.environ["MASTER_PORT"]) == (1, "1")
            assert os.environ["RANK"] == str(rank)


    def test_t(is_fine):
        assert is_fine


    LARGE = []
    COLLECTED = []


    def note(phase, info):
        COLLECTED.append(info["generation"])


    def use_memory():
        tensor = torch.ones(1)
        LARGE.append(weakref.ref(tensor))
        raise ValueError(tensor)


    def test_u_fails_with_large_tensors():
        try:
            use_memory()
        except ValueError:
            other = torch.ones(1)
            LARGE.append(weakref.ref(other))
            gc.collect()  # they are old when the test fails
            assert use_memory() is other


    @pytest.fixture
    def num_tensors():
        return sum(reference() is not None for reference in LARGE)


    def test_v_has_their_memory(num_tensors):
        assert (num_tensors, len(LARGE)) == (0, 3)


    @pytest.fixture(scope="module")
    def broken():
        raise ValueError


    def test_w_fails_at_once():
        gc.callbacks.append(note)
        use_memory()


    def test_x_has_a_broken_fixture(broken):
        pass


    def test_y_has_their_memory_and_nothing_old_was_looked_at(num_tensors):
        gc.callbacks.remove(note)
        assert (num_tensors, len(LARGE)) == (0, 4)
        assert COLLECTED
        assert 2 not in COLLECTED
"""
_WARNING = re.compile(
    r"^(test_\S+)\n  .*?PytestWarning: the test left its rank (.*)$", re.MULTILINE
)


def test_what_a_test_leaves_in_its_rank_harms_no_other_and_is_told(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_state=SUITE)
    run = suite.run("-v", "--ranks=2", "--device=cpu", "--basetemp=tmp")
    failed = [name.rpartition("::")[2] for name, word in run.words.items() if word != "PASSED"]
    assert failed == [
        "test_u_fails_with_large_tensors",
        "test_w_fails_at_once",
        "test_x_has_a_broken_fixture",
    ], run.stdout
    assert len(run.words) == 23
    told = {name.rpartition("::")[2]: text for name, text in _WARNING.findall(run.stdout)}
    assert sorted(told) == [
        "test_a_leaves_a_small_group",
        "test_c_leaves_another_backend",
        "test_e_leaves_a_small_group_on_one_rank",
        "test_g_leaves_another_directory",
        "test_i_leaves_variables",
        "test_k_leaves_no_variables",
        "test_r_leaves_a_variable_too",
    ], run.stdout
    assert told["test_c_leaves_another_backend"] == (
        "in another state: it left a default process group of 2 ranks (fake) in the place of "
        "2 ranks (gloo), and its gang is replaced"
    )
    assert "MASTER_PORT unset" in told["test_i_leaves_variables"]
    recorded = json.loads((suite.root / ".pytest_megatron/runs/latest/run.json").read_text())
    attempts = [one for item in recorded["items"].values() for one in item["attempts"]]
    assert [one["end"] for one in attempts if not one["is_gang_kept"]] == ["done"] * 3


LEAVES_STREAMS = """
    import io
    import os
    import sys

    def test_replaces_stdout(rank):
        sys.stdout = io.StringIO()

    def test_after_replaced(rank):
        print("words of the first")
        assert False

    def test_closes_stdout(rank):
        sys.stdout.close()

    def test_after_closed(rank):
        print("words of the second")
        assert False

    def test_closes_descriptors(rank):
        for number in range(3):
            os.close(number)

    def test_after_descriptors(rank, tmp_path):
        (tmp_path / "file").touch()
        print("words of the third")
        assert sys.stdin.read() == "x"
"""


def test_standard_streams_are_opened_anew(tmp_path: Path) -> None:
    suite = Suite(tmp_path).write(test_streams=LEAVES_STREAMS)
    run = suite.run("-v", "--ranks=2", "--device=cpu")
    failed = [name for name, word in run.words.items() if word == "FAILED"]
    assert failed == ["test_after_replaced", "test_after_closed", "test_after_descriptors"]
    for number in ("first", "second", "third"):
        assert f"\nwords of the {number}\n" in run.stdout
    assert "AssertionError: assert '' == 'x'" in run.stdout
    told = [name.rpartition("::")[2] for name, _ in _WARNING.findall(run.stdout)]
    assert told == ["test_replaces_stdout", "test_closes_stdout", "test_closes_descriptors"]
