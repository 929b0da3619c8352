"""`--stress N`: each distributed test N times, in another order and with delays in its ranks.

A repeat is a parameter of the test, so that each has a node id, a report and a line that
reproduces it.
"""

from __future__ import annotations

import random
import shlex
from collections import Counter

import pytest

from pytest_megatron.base.text import numbered_parameter
from pytest_megatron.gangs.markers import asks_for_gang
from pytest_megatron.session.options import Options, dest

NAME = "megatron-stress"
_ARGUMENT = "_megatron_stress"
_REPEAT = numbered_parameter("repeat")
_NOTHING = (
    "no distributed test ran, so --stress repeated nothing; give --ranks or --gpus "
    "(tests of unittest and doctests run once)"
)


def parametrise_repeats(metafunc: pytest.Metafunc) -> None:
    """Parametrise a test that runs on a gang by its repeats, if the option asks for them."""
    text = metafunc.config.getoption(dest("stress"), None) or metafunc.config.getini(dest("stress"))
    definition = metafunc.definition
    if not text or not str(text).isdecimal():  # `read_options` reports a wrong value
        return
    sizes = (dest("ranks"), dest("gpus"))
    is_on_gang = any(metafunc.config.getoption(n) or metafunc.config.getini(n) for n in sizes)
    if definition.get_closest_marker("controller") is not None:
        return
    if is_on_gang or asks_for_gang(definition):
        numbers = range(1, int(text) + 1)
        metafunc.fixturenames.append(_ARGUMENT)
        metafunc.parametrize(_ARGUMENT, numbers, ids=[f"repeat{n}" for n in numbers])


class StressPlugin:
    """Shuffles the repeats and reports the failure rate of each test; in every controller."""

    def __init__(self, config: pytest.Config, options: Options) -> None:
        self._config = config
        self._seed = options.stress_seed
        self._runs: dict[str, bool] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Change the order of the repeats; other items keep their places."""
        places = [place for place, item in enumerate(items) if _is_repeat(item)]
        # Other plugins may have shuffled them: the order is that of the seed alone.
        repeats = sorted((items[place] for place in places), key=lambda item: item.nodeid)
        random.Random(self._seed).shuffle(repeats)  # noqa: S311 - no secret
        for place, item in zip(places, repeats, strict=True):
            items[place] = item

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a repeat; one that is skipped does not count."""
        if _REPEAT.search(report.nodeid) is None:
            return
        if report.failed:
            self._runs[report.nodeid] = True
        elif report.passed and report.when == "call":
            self._runs.setdefault(report.nodeid, False)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the failure rate of each test, and the line that repeats all of it."""
        num_runs = Counter(_REPEAT.sub("", node_id) for node_id in self._runs)
        num_failed = Counter(_REPEAT.sub("", name) for name, failed in self._runs.items() if failed)
        terminalreporter.section("stress")
        if not num_runs:
            terminalreporter.write_line(f"megatron: {_NOTHING}", yellow=True)
        for test, number in sorted(num_runs.items(), key=lambda pair: -num_failed[pair[0]]):
            terminalreporter.write_line(f"{test}: {describe_rate(num_failed[test], number)}")
        words = list(map(str, self._config.invocation_params.args))
        given = " ".join(words)
        if "megatron_stress_seed" not in given:
            words += ["-o", f"megatron_stress_seed={self._seed}"]
        if hasattr(self._config.option, "randomly_seed") and "--randomly-seed" not in given:
            words.append(f"--randomly-seed={self._config.option.randomly_seed}")
        terminalreporter.write_line(f"reproduce: {shlex.join(['pytest', *words])}")


def _is_repeat(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is not None and _ARGUMENT in callspec.params


def describe_rate(num_failed: int, number: int) -> str:
    """Return the failure rate of a test in words."""
    from pytest_megatron.runs.history import wilson_interval  # noqa: PLC0415 - only with the option

    low, high = wilson_interval(num_failed, number)
    rate = num_failed / number
    return f"failed in {num_failed} of {number} runs, {rate:.1%} (95 %: {low:.1%} to {high:.1%})"
