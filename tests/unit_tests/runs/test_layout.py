from __future__ import annotations

from pathlib import Path

from pytest_megatron.runs.layout import item_dirs


def test_an_item_has_a_directory_that_a_person_recognises() -> None:
    dirs = item_dirs(Path("run"), "recipes/gpt.yaml::tp1_pp1[dev-cpu]")
    assert dirs.attempt(repeat=1, attempt=2).phase(1).tensorboard == Path(
        "run/gpt-tp1_pp1-dev-cpu-d11620/repeat_1/attempt_2/phase_1/tensorboard"
    )


def test_node_ids_that_look_alike_get_directories_of_their_own() -> None:
    names = [
        "recipes/a.yaml::x[dev-cpu]",
        "recipes/a.yaml::x(dev cpu)",
        "recipes/a.yaml::x/dev/cpu",
        "recipes/a-x.yaml::dev-cpu",
    ]
    assert len({item_dirs(Path(), name).root for name in names}) == len(names)


def test_a_long_node_id_still_makes_a_file_name() -> None:
    assert len(item_dirs(Path(), "recipes/a.yaml::" + "x" * 4000).root.name) < 200
