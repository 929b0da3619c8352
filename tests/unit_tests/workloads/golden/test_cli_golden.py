from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_command import Ran, run
from golden_files import write_golden
from test_tensorboard import event, simple, write_events

from pytest_megatron.workloads.golden.model import Provenance, Value, series_of
from pytest_megatron.workloads.golden.store import write_metrics

LOSS: dict[int, Value] = {s: 5.0 - s / 100 for s in range(1, 51)}
COSTS = ("iteration-time", "mem-max-allocated-bytes")


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    path = tmp_path / "golden.json"
    metrics = {"lm loss": series_of(LOSS, is_full_precision=True)}
    write_golden(path, metrics, Provenance(deterministic=True, repeats=2, gpu="1x H100"))
    return path


@pytest.fixture
def observed(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.json"
    write_metrics(path, {"lm loss": series_of(LOSS, is_full_precision=True)})
    return path


def check(golden: Path, observed: Path, *more: str) -> Ran:
    return run("check", "--golden", golden, "--observed", observed, *more)


def test_an_equal_run_passes(golden: Path, observed: Path) -> None:
    told = f"lm loss: passed, 50 steps; bitwise equal; {golden}\nstrict: all passed\n"
    assert check(golden, observed) == (0, told, "")


@pytest.mark.parametrize(
    ("step_7", "verdict"), [(4.93, "1 passed"), (4.94, "1 of 3 failed")], ids=["passed", "failed"]
)
def test_the_last_line_counts_what_was_not_judged(
    golden: Path, observed: Path, step_7: float, verdict: str
) -> None:
    """Twice the time would have passed without a word below the first lines."""
    for path, cost in ((golden, 1.0), (observed, 2.0)):
        costs = {name: dict.fromkeys(LOSS, cost) for name in COSTS}
        loss = LOSS if path is golden else {**LOSS, 7: step_7}
        write_metrics(
            path, {"lm loss": series_of(loss), **{k: series_of(v) for k, v in costs.items()}}
        )
    last = check(golden, observed).out.splitlines()[-1]
    assert last == (
        f"strict: {verdict}, 2 not judged: iteration-time, mem-max-allocated-bytes (the golden "
        "does not say on which class of host it was measured)"
    )
    only = check(golden, observed, "--metric", "iteration-time")
    assert (only.code, only.out.splitlines()[-1].partition(":")[2][:14]) == (2, " 0 passed, 1 n")


def test_a_different_run_fails_and_says_where(golden: Path, observed: Path) -> None:
    write_metrics(observed, {"lm loss": series_of({**LOSS, 7: 4.94})})
    found = check(golden, observed, "--format", "json")
    assert found.code == 1
    answer = json.loads(found.out)
    assert (answer["passed"], answer["policy"]) == (False, "strict")
    (comparison,) = answer["comparisons"]
    assert {"layer": "presence", "measured": 50.0}.items() <= comparison["layers"][0].items()
    wanted = ("metric", "rule", "first_step", "worst_step")
    assert [comparison[key] for key in wanted] == ["lm loss", "early window", 7, 7]


def test_what_failed_comes_first(golden: Path, observed: Path) -> None:
    for path, num in ((golden, 100.0), (observed, 200.0)):
        zeros = dict.fromkeys(LOSS, num)
        write_metrics(path, {"lm loss": series_of(LOSS), "num-zeros": series_of(zeros)})
    found = check(golden, observed)
    assert (found.code, found.out.startswith("num-zeros, ")) == (1, True)
    assert "\nlm loss: passed, " in found.out


def test_the_policy_and_its_mode_can_be_chosen(golden: Path, observed: Path) -> None:
    write_metrics(observed, {"lm loss": series_of({**LOSS, 7: 99.0})})
    megatron = ("--golden-policy", "megatron", "--metric", "lm loss")
    assert check(golden, observed, *megatron).code == 1
    assert check(golden, observed, *megatron, "--nondeterministic").code == 0


def test_a_compared_metric_has_one_value_a_step(golden: Path, tmp_path: Path) -> None:
    for name, code in (("val loss", 0), ("lm loss", 2)):
        events = [event(s, simple("lm loss", float(str(v)))) for s, v in LOSS.items()]
        both = [event(7, simple(name, value)) for value in (4.93, 0.5)]
        write_events(tmp_path / "tb" / "events.out.tfevents.1.h", *events, *both)
        found = check(golden, tmp_path / "tb")
        assert (found.code, "step 7 has two values of 'lm loss'" in found.err) == (code, code == 2)


@pytest.mark.parametrize(
    ("texts", "more", "message"),
    [
        pytest.param({"golden": None}, (), "golden.json: no such file", id="no-golden"),
        pytest.param({"metrics": None}, (), "metrics.json: no such file", id="no-metrics"),
        pytest.param(
            {"metrics": '{"a": {"values": {"1": 1}}}'},
            (),
            "no metric in common",
            id="nothing-common",
        ),
        pytest.param(
            {},
            ("--golden-policy", "mine.toml"),
            "--golden-policy: unknown policy 'mine.toml', expected megatron, strict or the path ",
            id="policy",
        ),
        pytest.param({}, ("--format", "xml"), "--format", id="usage"),
    ],
)
@pytest.mark.usefixtures("golden", "observed")
def test_unusable_input_is_named_on_stderr_with_exit_code_2(
    tmp_path: Path,
    texts: dict[str, str | None],
    more: tuple[str, ...],
    message: str,
) -> None:
    for name, text in texts.items():
        path = tmp_path / f"{name}.json"
        path.unlink() if text is None else path.write_text(text)
    found = check(tmp_path / "golden.json", tmp_path / "metrics.json", *more)
    assert (found.code, found.out, message in found.err) == (2, "", True)


def test_megatron_without_its_default_metrics_compares_nothing(
    golden: Path, observed: Path
) -> None:
    for path in (golden, observed):
        path.write_text('{"iteration-time": {"values": {"1": 1}}}')
    found = check(golden, observed, "--golden-policy", "megatron")
    assert found.code == 2
    assert "no metric that megatron compares by default" in found.err


@pytest.mark.parametrize("command", ["lint", "check"])
def test_what_a_file_says_cannot_steer_the_terminal(tmp_path: Path, command: str) -> None:
    """A name of a metric that clears the screen and retitles the window."""
    evil = tmp_path / "golden_values_dev_dgx_h100.json"
    name = "lm loss\x1b[2J\x1b]0;owned\x07\x9b1m"
    values = {"1": "\x1b[8m", "2": 1.5}
    block = {"start_step": 1, "end_step": 9, "step_interval": 1, "values": values}
    evil.write_text(json.dumps({name: block, "ok": {**block, "values": {"1": 1, "2": 2}}}))
    words = ("--golden", evil, "--observed", evil) if command == "check" else (evil,)
    printed = run(command, *words)
    text = printed.out + printed.err
    assert r"\x1b[2J\x1b]0;owned\x07\x9b1m" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
