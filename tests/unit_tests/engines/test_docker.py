"""Attempts in containers, on a real dockerd: what ends them, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from labs import DockerLab, wait_until
from worker_engine import Silent

import pytest_megatron
from pytest_megatron.engines.config import read_docker_config
from pytest_megatron.engines.docker.driver import LABEL_OWNER, owner
from pytest_megatron.engines.docker.engine import DockerEngine
from pytest_megatron.engines.docker.inside import _hand_over
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import Gpu
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.engine.api import (
    EngineContext,
    Planned,
    Resources,
    Submission,
    SubmissionOutcome,
)
from pytest_megatron.workloads.engine.api import TroubleKind as Kind
from pytest_megatron.workloads.training.plan.plan import AttemptPlan, PhasePlan
from pytest_megatron.workloads.training.run.runner import AttemptListener, Progress

pytestmark = pytest.mark.nightly

SOURCE = Path(pytest_megatron.__file__).parents[1]
READY = "[default0]:up"  # as torch.distributed.run copies a line of rank 0


class Place:
    """A project, and one engine that runs containers for it on a lab's daemon."""

    def __init__(self, root: Path, lab: DockerLab) -> None:
        self.root, self.lab = root, lab
        self._num_orders = 0
        self._engine: DockerEngine | None = None

    def engine(self, **settings: object) -> DockerEngine:
        """The engine, with these settings over the usual ones."""
        config: dict[str, object] = {
            "image": "hostusr:1",
            "python": sys.executable,
            "ulimits": {},
            "mounts": [f"{path}:{path}:ro" for path in ("/usr", sys.base_prefix, SOURCE)],
            **settings,
        }
        file = self.root / "executor.yaml"
        file.write_text(json.dumps({"format_version": 1, "docker": config}))
        if self._engine is None:
            self._engine = DockerEngine(self.context(file))
        self._engine._config = read_docker_config(file)
        return self._engine

    def another(self, **changes: str) -> DockerEngine:
        """An engine with these variables."""
        context = self.context(self.root / "executor.yaml")
        self.engine()
        return DockerEngine(replace(context, env={**context.env, **changes}))

    def context(self, file: Path) -> EngineContext:
        return EngineContext(
            root=self.root,
            run_dir=self.root / "run",
            facts=gather_facts(self.root),
            env=self.lab.env,
            config_file=file,
        )

    def order(
        self,
        *argv: str,
        listener: AttemptListener | None = None,
        limit_s: float = 60.0,
        gpus: int = 0,
    ) -> Submission:
        """An attempt that starts this program."""
        self._num_orders += 1
        key = f"item-{self._num_orders}/repeat_1/attempt_1"
        dirs = AttemptDirs(root=self.root / "run" / key)
        env = {"PATH": "/usr/bin:/bin", "TRAPS": "a b $HOME 'c' \"d\"\n\\e"}
        phase = PhasePlan(
            number=1, argv=argv, env=env, own_env=env, dirs=dirs.phase(1), last_iteration=None
        )
        plan = AttemptPlan(
            phases=(phase,), dirs=dirs, cwd=self.root, world_size=1, time_limit_s=limit_s
        )
        return Submission(
            key=key,
            node_id="recipes/x.yaml::x[dev-cpu]",
            resources=Resources(
                platform="dgx_h100" if gpus else "cpu",
                num_nodes=1,
                gpus_per_node=gpus,
                ranks_per_node=1,
                time_limit_s=limit_s,
            ),
            dirs=dirs,
            planned=lambda _devices: Planned(plan=plan, description={}),
            listener=listener or Silent(),
        )

    def run(self, order: Submission, engine: DockerEngine | None = None) -> SubmissionOutcome:
        """Run an order to its end; nothing of it may be left."""
        engine = engine or self.engine()
        engine.submit([order])
        try:
            (update,) = engine.poll()
        finally:
            assert self.lab.containers() == []
            assert list((self.root / "run" / "engine" / "docker").glob("job-*")) == []
        assert update.outcome is not None
        return update.outcome

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


class OnLines:
    """A listener that does something as soon as a program is up."""

    def __init__(self, act: object) -> None:
        self.act = act

    def on_lines(self, lines: list[str]) -> None:
        if "[rank0]: up" in lines:
            assert callable(self.act)
            self.act()

    def on_progress(self, phase: str, progress: Progress) -> None: ...


@pytest.fixture(scope="module")
def place(docker_lab: DockerLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("docker") / "pro ject, with:traps", docker_lab)
    place.root.mkdir()
    yield place
    place.close()
    assert list(place.root.glob("run/engine/**")) == []


def bash(text: str) -> tuple[str, ...]:
    return "bash", "-c", text


HANG = bash(f"echo {READY}; exec sleep 300")


def kind_of(outcome: SubmissionOutcome) -> Kind | None:
    return None if outcome.trouble is None else outcome.trouble.kind


def test_a_program_runs_with_its_arguments_variables_and_files(place: Place) -> None:
    order = place.order(*bash('printf %s "$TRAPS" > "$1"; id -u >> "$1"; exit 3'), "-", "f $x")
    outcome = place.run(order)
    (end,) = outcome.ends
    assert (end.end, end.returncode, outcome.trouble) == (End.EXITED, 3, None)
    written = place.root / "f $x"
    assert written.read_text() == f"a b $HOME 'c' \"d\"\n\\e{os.getuid()}\n"
    assert (written.stat().st_uid, order.dirs.plan.exists()) == (os.getuid(), True)
    assert outcome.hosts[0].startswith("pytest-megatron-")
    assert outcome.facts is not None
    assert outcome.facts.image is not None
    assert outcome.facts.image.startswith("hostusr:1 sha256:")


def test_what_root_wrote_for_somebody_else_is_given_to_them(place: Place, tmp_path: Path) -> None:
    order = place.order("true")
    place.engine()._write_job(tmp_path, order, order.planned(None))
    order.dirs.phase(1).logs.mkdir(parents=True)
    for path in (tmp_path / "spec.json", order.dirs.root.parents[2]):
        os.chown(path, 1234, 1234)
    _hand_over(tmp_path)
    run_dir = order.dirs.root.parents[2]
    theirs = (*run_dir.glob(f"{order.key.partition('/')[0]}/**/*"), *tmp_path.iterdir())
    assert {path.stat().st_uid for path in theirs} == {1234}
    assert run_dir.parent.stat().st_uid == 0
    os.chown(run_dir, 0, 0)


def test_a_link_that_leads_out_of_the_project_leads_there_in_the_container(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "scratch" / "base").mkdir(parents=True)
    (tmp_path / "scratch" / "base" / "latest").write_text("100")
    (tmp_path / "second").symlink_to(tmp_path / "scratch")
    (place.root / "checkpoints").symlink_to(tmp_path / "second")
    base = place.root / "checkpoints" / "base"
    order = place.order(*bash(f'cat "{base}/latest" > read; touch "{base}/new"'))
    (phase,) = order.planned(None).plan.phases
    plan = replace(order.planned(None).plan, phases=(replace(phase, frozen_paths=(base,)),))
    place.run(replace(order, planned=lambda _devices: Planned(plan=plan, description={})))
    assert (place.root / "read").read_text() == "100"
    assert [path.name for path in base.iterdir()] == ["latest"]


def test_a_time_limit_is_the_workload_s_own(place: Place) -> None:
    outcome = place.run(place.order(*HANG, limit_s=0.5))
    assert [end.end for end in outcome.ends] == [End.TIME_LIMIT]


def test_memory_that_is_used_up_is_told_from_a_crash(place: Place) -> None:
    engine = place.engine(memory="400m")
    order = place.order(sys.executable, "-c", "x = bytearray(1 << 30)")
    outcome = place.run(order, engine)
    assert kind_of(outcome) is Kind.OUT_OF_MEMORY
    assert [end.returncode for end in outcome.ends] == [-signal.SIGKILL]
    assert kind_of(place.run(place.order(*bash("kill -9 $$")), engine)) is None


@pytest.mark.everyday
def test_a_container_that_somebody_kills_is_lost_and_one_that_is_stopped_cancelled(
    place: Place,
) -> None:
    def kill() -> None:
        (name,) = place.lab.containers()
        place.lab.docker("kill", name)

    def remove() -> None:
        (name,) = place.lab.containers()
        place.lab.docker("rm", "--force", name)

    def stop() -> None:
        (name,) = place.lab.containers()
        place.lab.docker("stop", name)

    assert kind_of(place.run(place.order(*HANG, listener=OnLines(kill)))) is Kind.LOST
    assert kind_of(place.run(place.order(*HANG, listener=OnLines(remove)))) is Kind.LOST
    assert kind_of(place.run(place.order(*HANG, listener=OnLines(stop)))) is Kind.CANCELLED


def test_ctrl_c_ends_the_container_first(place: Place) -> None:
    order = place.order(*HANG, listener=OnLines(lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        place.run(order)


def test_a_second_ctrl_c_does_not_wait_for_a_stubborn_program(place: Place) -> None:
    sign = place.root / "told"
    stubborn = bash(f"trap 'touch \"{sign}\"' TERM; echo {READY}; while :; do sleep 0.1; done")

    def again() -> None:
        wait_until(sign.exists, "the program is told to end")
        os.kill(os.getpid(), signal.SIGINT)

    second = threading.Thread(target=again)

    def first() -> None:
        second.start()
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        place.run(place.order(*stubborn, listener=OnLines(first)))
    second.join()


def drivers(pid: int) -> list[psutil.Process]:
    """The child processes that run containers for a process."""
    return [p for p in psutil.Process(pid).children() if "docker.driver" in " ".join(p.cmdline())]


CONTROLLER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from labs import DockerLab
from test_docker import HANG, OnLines, Place

class Lab(DockerLab):
    def __init__(self): self.env = {env!r}

place = Place(Path({root!r}), Lab())
outcome = place.run(place.order(*HANG, listener=OnLines(lambda: print("up", flush=True))))
print(outcome.trouble.kind.value, outcome.trouble.text)
place.close()
"""


def controller_of(place: Place, root: Path) -> psutil.Popen:
    """A controller in a process of its own, once its container is up."""
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    text = CONTROLLER.format(paths=paths, env=place.lab.env, root=str(root))
    found = psutil.Popen([sys.executable, "-c", text], stdout=-1, text=True, env=place.lab.env)
    assert found.stdout.readline() == "up\n"
    return found


def test_a_container_whose_process_here_is_killed_is_removed(place: Place, tmp_path: Path) -> None:
    with controller_of(place, tmp_path) as controller:
        (driver,) = drivers(controller.pid)
        driver.kill()
        printed = controller.stdout.read()
    assert printed.startswith("lost the process that runs containers ended by itself (signal 9)")
    assert controller.returncode == 0
    assert place.lab.containers() == []


def test_a_container_is_ended_when_the_controller_is_killed(place: Place, tmp_path: Path) -> None:
    with controller_of(place, tmp_path) as controller:
        controller.kill()
    wait_until(lambda: place.lab.containers() == [], "the container is gone")


def test_containers_of_dead_processes_are_removed_and_others_stay(place: Place) -> None:
    dead = owner().rpartition("/")[0] + "/1"  # somebody else had the number before
    for name, label in (("dead", dead), ("living", owner()), ("elsewhere", f"x{dead}")):
        words = ("--label", f"{LABEL_OWNER}={label}", "-v", "/usr:/usr:ro", "hostusr:1")
        place.lab.docker("run", "--detach", "--name", name, *words, "sleep", "300")
    try:
        engine = place.engine()
        engine.submit([place.order("true")])
        engine.poll()
        assert sorted(place.lab.containers()) == ["elsewhere", "living"]
    finally:
        place.lab.docker("rm", "--force", "dead", "living", "elsewhere")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        pytest.param(
            {"image": f"sha256:{'0' * 64}"}, "is not on this machine; name one", id="no-image"
        ),
        pytest.param({"image": "localhost:1/x"}, "cannot be fetched (", id="no-registry"),
        pytest.param({"mounts": []}, f'exec: "{sys.executable}"', id="empty"),
        pytest.param({"python": "/no py"}, 'exec: "/no py"', id="no-python"),
        pytest.param({"python": "/usr/bin/python3"}, "No module named", id="no-package"),
        pytest.param({"mounts": ["/nosuch:/x"]}, "bind source path does not exist", id="no-mount"),
        pytest.param({"network": "nosuch"}, "network nosuch not found", id="no-network"),
    ],
)
def test_an_image_that_is_no_good_is_an_error_that_says_so(
    place: Place, settings: dict[str, object], text: str
) -> None:
    with pytest.raises(LaunchError) as error:
        place.run(place.order("true"), place.engine(**settings))
    assert text in str(error.value)
    assert "Traceback" not in str(error.value)


def test_gpus_are_asked_for_by_uuid_of_a_daemon_that_has_them(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_MEGATRON_LEASES", str(tmp_path))
    gpu = Gpu(index=0, name="NVIDIA H100", uuid="GPU-1", memory_bytes=1)
    engine = place.engine()
    monkeypatch.setattr(engine, "_host", replace(engine._host, gpus=(gpu,)))
    with pytest.raises(LaunchError, match="install nvidia-container-toolkit"):
        place.run(place.order("true", gpus=1), engine)


def error_with(place: Place, host: str) -> str:
    """The error of an engine whose daemon is there."""
    engine = place.another(DOCKER_HOST=host)
    engine.submit([place.order("true")])
    with pytest.raises(LaunchError) as error:
        engine.poll()
    return str(error.value)


def test_a_daemon_that_is_away_is_an_error_that_says_so(place: Place, tmp_path: Path) -> None:
    deaf = tmp_path / "deaf.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(deaf))
    assert "no Docker daemon can be used: " in error_with(place, "unix:///nosuch")
    assert "Connection refused" in error_with(place, f"unix://{deaf}")
    assert "no Docker daemon can be used: " in error_with(place, "tcp://127.0.0.1:1")


def test_a_daemon_that_ends_is_an_error_and_another_one_is_used(place: Place) -> None:
    engine = place.engine()
    place.run(place.order("true"), engine)
    place.lab.stop()
    engine.submit([place.order("true")])
    try:
        with pytest.raises(LaunchError, match="no Docker daemon can be used"):
            engine.poll()
    finally:
        place.lab.start()
    assert [end.returncode for end in place.run(place.order("true"), engine).ends] == [0]


@pytest.mark.everyday
def test_a_recipe_is_trained_and_judged_as_it_is_here(place: Place, tmp_path: Path) -> None:
    """A whole session on a real recipe, in the project's own checkout."""
    place.engine(network="none")
    words = ["--executor", "docker", "--executor-config", str(place.root / "executor.yaml")]
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    # From inside of the project out of it, and through a link: the container knows neither.
    run_dir = os.path.relpath(tmp_path / "link" / "run", SOURCE)
    words += ["--platform", "cpu", "-k", "tp1_pp1 and not bf16", "--run-dir", run_dir]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "megatron", "recipes/gpt.yaml", *words],
        cwd=SOURCE,
        env=place.lab.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "lm loss 5.5521 -> 2.2420 in 50 iterations" in done.stdout
    written = tmp_path / "scratch" / "run"
    (item,) = json.loads((written / "run.json").read_text())["items"].values()
    assert item["verdict"] == "passed"
    assert not (written / "engine").exists()
    assert place.lab.containers() == []
