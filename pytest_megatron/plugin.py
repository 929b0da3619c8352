"""The plugin: options, fixtures and, where asked for, workloads and gangs.

`pytest_megatron.entry` loads it in a session that asks for it. It must import nothing heavy (no
torch, no pydantic, no yaml) and run tests as ever while none of our options is given.

PYTEST_DONT_REWRITE: see `entry`; without these words pytest warns where this module is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from pytest_megatron.features import ExtensionPoint
from pytest_megatron.gangs.fixtures import (  # noqa: F401 - pytest finds them here
    _megatron_world_size,
    device,
    local_rank,
    model_parallel,
    process_group,
    rank,
    shared_tmp_path,
    world_size,
)
from pytest_megatron.gangs.markers import (
    asks_for_gang,
    declare_marks,
    parametrise_sizes,
)
from pytest_megatron.gangs.start.environment import (
    KEY,
    record_start_environment,
    refuse_launcher,
)
from pytest_megatron.process.originals import os  # loaded before any test can patch the library
from pytest_megatron.session import exit_code, options
from pytest_megatron.session.arguments import (
    are_recipes_asked_for,
    refuse_root_of_values,
)
from pytest_megatron.session.options import has_workers
from pytest_megatron.session.short_names import PREFIX, ShortNames

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

    from pytest_megatron.gangs.controller.plugin import GangPlugin
    from pytest_megatron.session.state import RunSession

# What features do in a session, in the order of the table.
_OfSession: TypeAlias = Callable[[pytest.Config], None]
_OfItems: TypeAlias = Callable[[pytest.Config, list[pytest.Item]], None]
# Before conftest files.
_BEGIN: ExtensionPoint[Callable[[pytest.Config, list[str]], None]] = ExtensionPoint("begin")
_CONFIGURE: ExtensionPoint[_OfSession] = ExtensionPoint("configure")
_HAS_WORKER: ExtensionPoint[_OfSession] = ExtensionPoint("has_worker")  # of pytest-xdist
_SELECTED: ExtensionPoint[_OfItems] = ExtensionPoint("selected")  # those that will run
_USAGE_ERROR = "megatron_usage_error"
_LAUNCHED = "TORCHELASTIC_RUN_ID"  # `torch.distributed.run` has started this process as a rank
_CHANGING_ARGUMENTS = frozenset(("bucket",))
_SHORT_NAMES = pytest.StashKey[ShortNames]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the options."""
    names = options.add_options(parser)
    config = pluginmanager.get_plugin("pytestconfig")
    assert isinstance(config, pytest.Config)
    config.stash[_SHORT_NAMES] = names


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Note how the session begins, before anything of the project is imported."""
    for begin in _BEGIN.all():
        begin(early_config, args)
    if not options.is_rank(early_config):
        record_start_environment(early_config)
        if early_config.stash[KEY].is_collecting:
            from pytest_megatron.gangs.start.start_mode import load_ahead

            load_ahead(early_config)


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_load_initial_conftests")
def pytest_take_names(early_config: pytest.Config, args: list[str]) -> Generator[None]:
    """Leave names of options to conftest files, and read again what was read as ours."""
    exit_code.register(early_config)
    names, typed = early_config.stash[_SHORT_NAMES], list(args)
    free = names.read(early_config, args)
    try:
        yield
    finally:  # `--help` shows them, whatever a conftest.py raises
        names.declare_free()
    taken = free.intersection(names.taken)  # by conftest files, after words were read as ours
    if not _CHANGING_ARGUMENTS.isdisjoint(taken):
        args[:] = typed
    if taken:
        names.read(early_config, args)
        early_config.stash[KEY].forget_unless(options.early_size(early_config))


def pytest_report_header(config: pytest.Config) -> str | None:
    """Name the options that others have."""
    taken = sorted(config.stash[_SHORT_NAMES].taken)
    if not taken:
        return None
    theirs, ours = (", ".join(f"--{p}{name}" for name in taken) for p in ("", PREFIX))
    return f"megatron: declared by this project or another plugin: {theirs}; ours: {ours}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that this session is known to have."""
    if not config.option.help:
        config.stash[_SHORT_NAMES].withdraw()  # from conftest files further down
    for configure in _CONFIGURE.all():
        configure(config)
    if options.is_rank(config):
        declare_marks(config)
        return
    names = {row.name for row in options.OPTION_ROWS.values() if row.metavar}
    refuse_root_of_values(config, names)
    chosen = options.read_options(config)
    exit_code.register(config)
    if chosen.asks_for_workloads or chosen.asks_for_gangs:
        refuse_launcher(config, chosen.num_nodes)
    if chosen.asks_for_workloads or are_recipes_asked_for(config):
        from pytest_megatron.workloads.items.plugin import register_roles

        register_roles(config)
        _register_cancelled(config)
    declare_marks(config)
    if chosen.num_nodes > 1:
        _refuse_with_nodes(config)
    if chosen.node_rank > 0:
        from pytest_megatron.gangs.nodes.follower import FOLLOWER_NAME, FollowerPlugin

        config.pluginmanager.register(FollowerPlugin(config, chosen), FOLLOWER_NAME)
        config.stash[options.HAS_GANGS] = True
    elif chosen.asks_for_gangs:
        _register_gangs(config)
    elif chosen.run_dir is not None:
        _register_run_file(config, chosen)


def _refuse_with_nodes(config: pytest.Config) -> None:
    """Refuse options of other plugins that are for one node.

    Raises:
        pytest.UsageError: One is given.
    """
    from pytest_megatron.gangs.controller.testmon import is_asked_for

    if has_workers(config):
        raise pytest.UsageError("--nnodes: pytest-xdist (-n) runs on one node; drop one of them")
    if is_asked_for(config):
        raise pytest.UsageError(
            "--nnodes: pytest-testmon (--testmon) records on one node; drop one of them"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Send a worker of pytest-xdist the run directory and the command line."""
    from pytest_megatron.session.state import session_of

    session = session_of(node.config)
    for has_worker in _HAS_WORKER.all():
        has_worker(node.config)
    _register_one_process(node.config)  # shows what workers found
    _register_gang_results(node.config, session)  # only workers know whether tests have our marks
    node.workerinput.update(session.worker_input())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Run tests with marks of ours on gangs, also where no option asks for gangs."""
    try:
        yield
        is_rank = options.is_rank(config) or _LAUNCHED in os.environ
        has_gang = config.stash.get(options.HAS_GANGS, False) or is_rank
        if not is_rank and any(hasattr(item, "fixturenames") for item in items):
            _register_one_process(config)
        functions = (item for item in items if isinstance(item, pytest.Function))
        if not has_gang and any(map(asks_for_gang, functions)):
            _register_gangs(config).pytest_collection_modifyitems(items)
        for selected in _SELECTED.all():
            selected(config, items)
    except pytest.UsageError as error:
        if hasattr(config, "workeroutput"):  # its terminal is nobody's; see `pytest_testnodedown`
            config.workeroutput[_USAGE_ERROR] = str(error)
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """End the session as a worker of pytest-xdist would have, if it found a mark that is wrong.

    Raises:
        pytest.UsageError: It did.
    """
    output = getattr(node, "workeroutput", {})
    problem = output.get(_USAGE_ERROR)
    if problem is not None:
        raise pytest.UsageError(problem)


def _register_one_process(config: pytest.Config) -> None:
    """Note tests that use fixtures of ranks and pass without any."""
    from pytest_megatron.gangs.controller.one_process import NAME, OneProcess

    if not config.pluginmanager.has_plugin(NAME):
        config.pluginmanager.register(OneProcess(config), NAME)


def _register_gangs(config: pytest.Config) -> GangPlugin:
    """Register the plugin of gangs, and what it needs."""
    from pytest_megatron.gangs.controller.plugin import PLUGIN_NAME, GangPlugin
    from pytest_megatron.session.run_file import register_history
    from pytest_megatron.session.state import session_of

    session = session_of(config)
    plugin = GangPlugin(config, session)
    config.pluginmanager.register(plugin, PLUGIN_NAME)
    _register_cancelled(config)
    if not session.is_worker:
        _register_gang_results(config, session)
        register_history(config, session)
    config.stash[options.HAS_GANGS] = True
    return plugin


def _register_cancelled(config: pytest.Config) -> None:
    """End in order when Slurm cancels the job, or CI does."""
    from pytest_megatron.session.cancelled import NAME, CancelledPlugin

    job = os.environ.get("SLURM_JOB_ID")
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist, whose controller ends it
    if not config.pluginmanager.has_plugin(NAME) and not (is_worker and job is None):
        config.pluginmanager.register(CancelledPlugin(job), NAME)


def _register_gang_results(config: pytest.Config, session: RunSession) -> None:
    """Have the results of distributed tests kept and shown, once for a session."""
    from pytest_megatron.gangs.controller.results import NAME, GangResults
    from pytest_megatron.session.run_file import run_file_of
    from pytest_megatron.session.state import register_reporters

    if not config.pluginmanager.has_plugin(NAME):
        results = GangResults(config, session, run_file_of(config, session))
        config.pluginmanager.register(results, NAME)
        register_reporters(config, session)


def _register_run_file(config: pytest.Config, chosen: options.Options) -> None:
    """Have `run.json` written if nothing but plain tests run: CI reads there how it ended."""
    from pytest_megatron.session.run_file import run_file_of
    from pytest_megatron.session.state import session_of

    session = session_of(config)
    if session.is_worker:
        return
    run_file_of(config, session)
    if not (chosen.is_plan or config.option.collectonly):
        session.refuse_used_run_dir()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests whose mark names several world sizes."""
    parametrise_sizes(metafunc)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect recipes, in a session that asked for them."""
    if not parent.config.pluginmanager.has_plugin(options.WORKLOADS_PLUGIN):
        return None
    from pytest_megatron.workloads.items.collect import collect_recipe

    return collect_recipe(file_path, parent)
