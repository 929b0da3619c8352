"""Scripts that call Megatron-LM's driver: what is read of them, refused, and left to bash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.recipe.case import fingerprint
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.recipe.megatron_row import native_rows, setup_lines
from pytest_megatron.workloads.recipe.model import Workload

CASE = "tests/functional_tests/test_cases/{model}/{test_case}"
CALL = "bash ./tests/functional_tests/shell_test_utils/run_ci_test.sh ${{ARGUMENTS[@]}}\n"
ARGUMENTS = """\
ARGUMENTS=(
    "DATA_PATH=/mnt/artifacts"
    "DATA_CACHE_PATH=/var/cache"  # of all runs
    "OUTPUT_PATH={assets_dir}"
    "TENSORBOARD_PATH={assets_dir}/tensorboard"
    "CHECKPOINT_SAVE_PATH={artifacts_dir}/checkpoints"
    "CHECKPOINT_LOAD_PATH=/mnt/artifacts/model/{name}"
    "TRAINING_SCRIPT_PATH=pretrain_gpt.py"
    "TRAINING_PARAMS_PATH=./CASE/model_config.yaml"
    "GOLDEN_VALUES_PATH=./CASE/golden_values_{environment}_{platforms}.json"
    "N_REPEAT={n_repeat}"
    "ENABLE_LIGHTWEIGHT_MODE=${{ENABLE_LIGHTWEIGHT_MODE:-}}"
    "RECORD_CHECKPOINTS=${{RECORD_CHECKPOINTS:-}}"
)
""".replace("CASE", CASE)
HEAD = """\
rm -f "${{HOME}}/.netrc"
unset RO_API_TOKEN
set -euo pipefail
ls
cd /opt/megatron-lm

NAME=$(echo {test_case}_{environment} | sed 's/dgx_h100/dgx_a100/g')
"""
H100 = f"{HEAD}\n{ARGUMENTS}\n{CALL}"
GB200 = f"""\
set -euo pipefail
: "${{{{RUN_ID:=pr-$$}}}}"
cd /opt/megatron-lm
export GPUS_PER_NODE={{gpus}}

# ${{{{CHECKPOINT_LOAD_PATH}}}} is not "read here
{ARGUMENTS.replace("/var/cache", "/var/$RUN_ID/cache/")}
set +x
{CALL.replace("${{ARGUMENTS[@]}}", '"${{ARGUMENTS[@]}}"').strip()}
exit_code=$?
echo "Exit code: $exit_code"
rm -rf /var/$RUN_ID || true
set -x
exit $exit_code
"""
ENV = {"HOME": "/home/me"}


def read(root: Path, script: str, env: Mapping[str, str] = ENV, **spec: object) -> Workload:
    """Write a recipe with a script, and return its row as it is run."""
    head = {"name": "{test_case}_{environment}", "model": "gpt", "gpus": 1, "n_repeat": 5} | spec
    lines = ["type: basic", "format_version: 1", "spec:"]
    lines += [f"  {key}: {yaml.safe_dump(value).splitlines()[0]}" for key, value in head.items()]
    lines += ["  script: |-"]
    product = "{environment: [dev], scope: [mr], platforms: [dgx_h100]}"
    text = "\n".join(lines) + "\n    " + script.replace("\n", "\n    ")
    text += f"\nproducts:\n  - test_case: [tp2]\n    products:\n      - {product}\n"
    path = root / "recipe.yaml"
    path.write_bytes(text.encode())
    (row,) = native_rows(load_recipe(path), env, root)
    return row


def test_both_spellings_of_megatron_lms_scripts_are_native_rows(tmp_path: Path) -> None:
    row = read(tmp_path, H100)
    assert row.by_bash is None
    assert row.script is None
    assert row.training_script_path == "pretrain_gpt.py"
    assert (row.data_path, row.data_cache_path) == ("/mnt/artifacts", "/var/cache")
    assert row.checkpoint_load_path == "/mnt/artifacts/model/tp2_dev"
    assert (row.gpus, row.written.gpus, row.n_repeat) == (8, 1, 5)
    assert row.of_driver is not None
    assert row.of_driver.unset == ("RO_API_TOKEN",)
    assert (row.of_driver.env, row.of_driver.directory) == ({}, "")
    assert fingerprint(row, {}) == fingerprint(row.written, {})
    gb200 = read(tmp_path, GB200, gpus=4)
    assert (gb200.by_bash, gb200.gpus) == (None, 4)
    assert gb200.data_cache_path is None  # the script makes it and removes it


def test_the_users_environment_counts_as_it_does_for_the_script(tmp_path: Path) -> None:
    data = tmp_path / "data"
    env = ENV | {"ENABLE_LIGHTWEIGHT_MODE": "true", "GPUS_PER_NODE": "2", "DATA_PATH": str(data)}
    row = read(tmp_path, H100.replace("/mnt/artifacts", "/opt/venv_not_there"), env)
    assert row.gpus == 2
    assert row.of_driver is not None
    assert row.of_driver.is_lightweight
    if not Path("/mnt/artifacts").exists():
        assert read(tmp_path, H100, env).data_path == str(data)


def test_what_a_script_sets_before_the_call_goes_to_the_training(tmp_path: Path) -> None:
    more = """\
export NCCL_DEBUG=INFO NVTE_FUSED_ATTN='0' # a comment
ROOT=/data
export CHECKPOINT_ROOT="$ROOT/${{USER_NAME:-nobody}}"
cd examples
"""
    script = H100.replace(CALL, more + CALL.replace("./tests", "/opt/megatron-lm/tests"))
    script = script.replace("=./tests", "=../tests").replace("=pretrain", "=../pretrain")
    row = read(tmp_path, script)
    assert row.by_bash is None
    assert row.of_driver is not None
    assert row.of_driver.env == {
        "NCCL_DEBUG": "INFO",
        "NVTE_FUSED_ATTN": "0",
        "CHECKPOINT_ROOT": "/data/nobody",
    }
    assert (row.of_driver.directory, row.training_script_path) == ("examples", "../pretrain_gpt.py")


def test_quotes_in_quotes_and_commands_are_what_they_mean(tmp_path: Path) -> None:
    nemo = H100.replace("=pretrain_gpt.py", '=\\"nemo llm pretrain --factory {model}\\"')
    nemo = nemo.replace("DATA_PATH=/mnt/artifacts", "DATA_PATH='-'").replace(
        "cd /opt/megatron-lm", "cd /opt/NeMo"
    )
    row = read(tmp_path, nemo.replace("./tests", "/opt/megatron-lm/tests"))
    assert row.training_script_path == "nemo llm pretrain --factory gpt"
    assert row.data_path == "-"
    assert row.of_driver is not None
    assert row.of_driver.directory == "/opt/NeMo"


def test_a_key_that_only_the_case_reads_is_handed_to_it(tmp_path: Path) -> None:
    script = H100.replace("ARGUMENTS=(\n", 'ARGUMENTS=(\n    "DATA_BLEND=/data/blend"\n')
    with pytest.raises(RecipeError, match="unknown key 'DATA_BLEND'"):
        read(tmp_path, script)
    case = tmp_path / CASE.format(model="gpt", test_case="tp2") / "model_config.yaml"
    case.parent.mkdir(parents=True)
    case.write_text("MODEL_ARGS:\n  --data-path: ${DATA_BLEND}\n")
    row = read(tmp_path, script)
    assert row.of_driver is not None
    assert row.of_driver.env == {"DATA_BLEND": "/data/blend"}


@pytest.mark.parametrize(
    ("given", "of_case", "repeats"),
    [
        ("{n_repeat}", "1", 1),  # gpt-grads.yaml of Megatron-LM
        ("3", '"2"', 2),
        ("3", "null", 3),
        ("3", "{}", "N_REPEAT is 'a container', expected a number from 1 on"),
        ("{n_repeat}", "often", "N_REPEAT is 'often', expected a number from 1 on"),
        ("0", "null", "N_REPEAT is '0', expected a number from 1 on"),
        ("", "null", 5),
    ],
)
def test_the_case_decides_how_often_the_driver_trains(
    given: str, of_case: str, repeats: int | str, tmp_path: Path
) -> None:
    case = tmp_path / CASE.format(model="gpt", test_case="tp2") / "model_config.yaml"
    case.parent.mkdir(parents=True)
    case.write_text(f"ENV_VARS:\n  N_REPEAT: {of_case}\n")
    script = H100.replace("{n_repeat}", given)
    row = read(tmp_path, script)
    if isinstance(repeats, int):
        assert (row.by_bash, row.n_repeat) == (None, repeats)
    else:
        assert str(row.by_bash).endswith(repeats)


def test_a_placeholder_that_the_row_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"uses \{HOME\}, which the row does not have"):
        read(tmp_path, H100.replace("ls\n", "ls ${HOME}\n"))


WRONG = {
    "command": ("=/var/cache", "=$(mktemp -d)", "'$(mktemp -d)', expected a value"),
    "backquotes": ("=/var/cache", "=`pwd`", "'`pwd`', expected a value"),
    "later": ("=/var/cache", "='$(pwd)'", "'$(pwd)', expected a value"),
    "by-name": ("=/var/cache", "=$NAME", "expected a value"),
    "quote": ('"DATA_CACHE_PATH=/var/cache"', '"DATA_CACHE_PATH=/var/cache', "is not closed"),
    "quote-of-comment": ('"  # of all runs', "'  # of all runs", "quote"),
    "key": ("DATA_CACHE_PATH", "DATA_CASH_PATH", "unknown key 'DATA_CASH_PATH', expected one of"),
    "outside": (
        "PARAMS_PATH=./tests",
        "PARAMS_PATH=../tests",
        "TRAINING_PARAMS_PATH is '../tests/f",
    ),
    "elsewhere": ("=pretrain_gpt.py", "=/etc/x.py", "'/etc/x.py', expected a path in the checkout"),
    "twice": (CALL, f"{CALL}ls\n{CALL}", "calls the driver a second time"),
    "windows": ("# of all runs", "# of all runs\r", "line ends as on Windows"),
}
# What stands on the line that the error names, where it is not the changed one.
PLACES = {"quote": '"DATA_CACHE_PATH', "twice": CALL.strip()}


@pytest.mark.parametrize("what", WRONG)
def test_a_script_that_is_wrong_is_one_error_with_its_line(what: str, tmp_path: Path) -> None:
    old, new, problem = WRONG[what]
    assert old in H100
    script = H100.replace(old, new)
    with pytest.raises(RecipeError) as found:
        read(tmp_path, script)
    assert problem in str(found.value)
    file, line = found.value.where.rsplit(":", 1)
    place = PLACES.get(what, new.strip().partition("\n")[0])
    lines = Path(file).read_text().split("\n")
    assert max(n for n, text in enumerate(lines, 1) if place in text) == int(line)


def test_what_bash_runs_is_named_with_its_line(tmp_path: Path) -> None:
    row = read(tmp_path, H100.replace("ls\n", "pip install {model}\n"))
    assert row.by_bash == "line 12: pip install {model}"
    row = read(tmp_path, H100.replace('"DATA_CACHE_PATH=/var/cache"', ""))
    assert str(row.by_bash).endswith("no DATA_CACHE_PATH is given to the driver, which demands it")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ls\n", "pip install megatron-energon\n"),
        ("ls\n", "ls > files.txt\n"),
        ("ls\n", "if [ -n x ]; then ls; fi\n"),
        ("ls\n", "cat <<END\nit's\nEND\n"),
        ("ls\n", f"chmod +x {CALL.split()[1]}\n"),
        ("ls\n", "export DATA_ROOT=~/data\n"),
        (CALL, f'ARGUMENTS+=("N_REPEAT=1")\n{CALL}'),
        ("=/var/cache", "=${{CACHE-/var/cache}}"),
        ("ls\n", "export MASTER_PORT=1\n"),
        ("ls\n", "NAME=$(pip install x)\n"),
        ("ls\n", "rm -rf /data\n"),
        (CALL, f"{CALL}python report.py\n"),
        (CALL, f"{CALL}exit 0\n"),
        (CALL, f"{CALL.strip()} | tee log\n"),
        (CALL, f"for i in 1 2; do\n{CALL}done\n"),
        (CALL, f"if true; then\n{CALL}else\n{CALL}fi\n"),
        ("=${{RECORD_CHECKPOINTS:-}}", "=true"),
        ("=/var/cache", "=/data/*"),
        ("model_config.yaml", "other.yaml"),
        ("{platforms}.json", "dgx_a100.json"),
        ("=/var/cache", "=$NOWHERE"),
        ("=/var/cache", r"=/var/ca\che"),
        ('"DATA_CACHE_PATH=/var/cache"', "cache"),
        ('"DATA_CACHE_PATH=/var/cache"', ""),
        (f")\n\n{CALL}", f"\n{CALL}"),
        (CALL, f"export GPUS_PER_NODE=all\n{CALL}"),
        (CALL, f"A=1 {CALL}"),
        (CALL, f"HOME=/data\n{CALL}"),
        (CALL, f"export A=1\nA=2\n{CALL}"),
        ("ls\n", "ls; pip install x\n"),
        ("ls\n", "ls \\\nx\n"),
        ("ls\n", "NAME=$(echo x | sh)\n"),
        ("cd /opt/megatron-lm\n", "cd ~/megatron-lm\n"),
    ],
)
def test_what_is_not_known_is_left_to_bash(old: str, new: str, tmp_path: Path) -> None:
    assert old in H100
    row = read(tmp_path, H100.replace(old, new))
    assert row.script is not None
    assert row.of_driver is None
    assert row.by_bash is not None
    assert row.by_bash.startswith("line ")


def test_what_a_script_setup_does_beside_the_checkout_is_named() -> None:
    checkout = 'set -e\ncd /opt\n# Checkout\ngit init\nprintf x >> "$HOME/.netrc"\n'
    assert list(setup_lines(checkout)) == []
    assert list(setup_lines(f"{checkout}pip install x\n")) == ["pip install x"]
