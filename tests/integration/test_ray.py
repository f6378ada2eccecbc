"""HERTransform in a Ray actor: collectors in other processes write into it, and learners sample from it.

Every actor is a process that imports TorchRL, so tests use few actors, and a single buffer if possible.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointRotation
from torchrl.data import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import SerialEnv

from support.factories import make_augmentation, make_transform
from support.tape import RELABELLED, check, check_nothing_is_lost, collected, make_tape
from torchrl_her import Checkpoints, EnvReward, PackedStorage, call_transform

ray = pytest.importorskip("ray", reason="Ray is an optional extra: pip install 'torchrl_her[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402
from torchrl.collectors.distributed import RayCollector  # noqa: E402 (it needs Ray)

SIZE = 10_000  # rows of storages and goal tables, large enough that nothing is overwritten
BATCH_SIZE = 256
SHARE = {"num_cpus": 0.25}  # of the two CPUs of the cluster, so that no actor waits for another one to end
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_point_reach.py"


# Actors


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:  # lets Ray's workers import this file and tests/support
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture
def at_the_end(cluster):
    """Close actors before the cluster, because closing one later starts another cluster."""
    with contextlib.ExitStack() as stack:
        yield stack


def make_hindsight(size):
    return make_transform(reward=EnvReward(make_tape), capacity=size)


def make_buffer(at_the_end, kind=TensorDictReplayBuffer, storage=None, hindsight=make_hindsight, size=SIZE, **kwargs):
    options = {"remote_config": SHARE, "storage": storage or partial(LazyTensorStorage, size), **kwargs}
    factory = hindsight and partial(hindsight, size)
    buffer = RayReplayBuffer(replay_buffer_cls=kind, transform_factory=factory, batch_size=BATCH_SIZE, **options)
    at_the_end.callback(buffer.close)
    return buffer


TAPES = [partial(make_tape, number) for number in range(4)]
PAIRS = [partial(SerialEnv, 2, TAPES[:2]), partial(SerialEnv, 2, TAPES[2:])]


def make_collector(at_the_end, environments, **kwargs):
    policy = TensorDictModule(nn.Linear(3, 2), ["observation"], ["action"])
    collector = RayCollector(environments, policy, frames_per_batch=60, remote_configs=SHARE, **kwargs)
    at_the_end.callback(collector.shutdown)
    collector.update_policy_weights_()
    return collector


# Checks


def share_relabelled(buffer, batches=20):
    """Check samples, and return the relabelled share of transitions from ended episodes."""
    rows = torch.cat([buffer.sample().reshape(-1) for _ in range(batches)])
    check(rows)
    number, episode, _ = rows["observation"].unbind(-1)
    ended = torch.zeros_like(episode, dtype=torch.bool)
    for environment in number.unique():
        of_it = number == environment
        ended |= of_it & (episode < episode[of_it].max())
    return rows[RELABELLED][ended].float().mean().item()


def check_learner(client):
    rows = torch.cat([client.sample() for _ in range(20)])
    check(rows)
    return len(rows)


# Collectors

# By name: the environments of each collector, arguments of the buffer, and arguments of the collectors.
OF_TWO = {"kind": ReplayBuffer, "storage": partial(LazyTensorStorage, SIZE, ndim=2)}
WAYS = {"collector_kwargs": [{}, {"trajs_per_batch": 4}, {"extend_buffer": False}]}
COLLECTED = {
    "several environments": (PAIRS, OF_TWO, {}),
    "batches, whole episodes and single steps": (TAPES[:3], {}, WAYS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTED)
def test_collectors_lose_nothing_and_get_correct_goals(name, at_the_end):
    environments, of_buffer, of_collectors = COLLECTED[name]
    buffer = make_buffer(at_the_end, **of_buffer)
    collector = make_collector(at_the_end, environments, replay_buffer=buffer, total_frames=600, **of_collectors)
    assert set(collector) == {None}
    stored = buffer[:].reshape(-1)
    assert environments is not PAIRS or len(stored) >= 600
    check(stored)
    check_nothing_is_lost(stored, environments=4 if environments is PAIRS else 3)
    episodes = stored["observation"][:, :2].unique(dim=0)
    assert len(stored["collector", "traj_ids"].unique()) < len(episodes), "no trajectory ids collided"
    assert share_relabelled(buffer) == pytest.approx(0.8, abs=0.03)


@pytest.mark.slow
def test_learners_sample_correct_goals_while_collectors_overwrite_the_buffer(at_the_end):
    size = 300
    # Two calls at a time: samples are drawn while the transitions of a collector are written.
    options = {"storage": partial(PackedStorage, size), "remote_config": {**SHARE, "max_concurrency": 2}}
    buffer = make_buffer(at_the_end, size=size, **options)
    collector = make_collector(at_the_end, TAPES[:2], replay_buffer=buffer, total_frames=1_000_000)
    collector.start()
    while buffer.write_count < size:
        time.sleep(0.01)
    learner = ray.remote(num_cpus=0.25)(check_learner)
    counts = ray.get([learner.remote(client) for client in buffer.clients(2)])
    assert counts == [20 * BATCH_SIZE] * 2
    while buffer.write_count < 5 * size:
        check(buffer.sample())
    collector.shutdown()
    assert len(buffer) == size
    assert share_relabelled(buffer) > 0.7  # the goals of the first steps of some episodes have left the table


# The learner


@pytest.mark.parametrize("transport", ["ray", "distributed"])
def test_samples_and_methods_of_the_transform_travel_between_the_actor_and_its_clients(at_the_end, transport):
    buffer = make_buffer(at_the_end, transport=transport)
    for data in collected(200).split(50):
        buffer.extend(data)
    assert len(buffer) == 200
    assert share_relabelled(buffer) == pytest.approx(0.8, abs=0.03)
    assert call_transform(buffer, "report").running == 1
    call_transform(buffer.client(), "flush")
    report = call_transform(buffer, "report")
    assert (report.transitions, report.running) == (200, 0)
    assert call_transform(buffer, "random_goals", count=20).shape == (20, 3)
    with pytest.raises(AttributeError, match="'HERTransform' object has no attribute 'repot'"):
        call_transform(buffer, "repot")
    buffer.close()
    with pytest.raises(RuntimeError, match="The RayReplayBuffer is closed"):
        call_transform(buffer, "report")


def test_flushed_transitions_of_an_augmentation_travel_to_the_client_and_back(at_the_end):
    buffer = make_buffer(at_the_end, hindsight=lambda size: make_augmentation(EnvReward(make_tape)))
    buffer.extend(collected(8))
    assert len(buffer.extend(call_transform(buffer, "flush"))) == 5 * 3  # the second episode


# The second episode of the data has 9 steps, and the first write ends after its third.


def goals_of_the_second_episode(buffer, step):
    """Check samples, and return the steps of the goals of a step of the second episode."""
    samples = torch.cat([buffer.sample() for _ in range(10)])
    check(samples)
    _, episode, at = samples["observation"].unbind(-1)
    drawn = samples[(episode == 1) & (at == step) & samples[RELABELLED].flatten()]
    return drawn["desired_goal"][:, 2].unique().tolist()


def test_a_refused_write_raises_in_the_writer_and_a_restored_buffer_continues_the_running_episode(at_the_end, tmp_path):
    buffer, (first, rest) = make_buffer(at_the_end), collected(16).split(8)
    with pytest.raises(KeyError, match="achieved_goal"):
        buffer.extend(first.exclude(("next", "achieved_goal")))
    assert len(buffer) == 0
    buffer.extend(first)
    state, rotation = buffer.state_dict(), CheckpointRotation(tmp_path, keep_last=2)
    rotation.save(Checkpoint(buffer=buffer), step=8)
    Checkpoints(tmp_path / "ours", buffer=buffer).save(8)
    assert call_transform(buffer, "report").running == 1
    for way in ("state_dict", "checkpoint", "checkpoint of a buffer that died"):
        buffer.extend(rest.clone())  # restoring undoes this write
        if "died" in way:
            ray.kill(buffer._rb)
            time.sleep(2)  # Ray kills in the background
            with pytest.raises(RayActorError):
                len(buffer)
            buffer.close()
            buffer = make_buffer(at_the_end)
        if way == "state_dict":
            buffer.load_state_dict(state)
        else:
            rotation.load_latest(Checkpoint(buffer=buffer))
        assert len(buffer) == 8
        buffer.extend(rest.clone())
        check_nothing_is_lost(buffer[:], environments=1)
        assert goals_of_the_second_episode(buffer, step=2) == [3, 4, 5, 6, 7, 8, 9]
    assert Checkpoints(tmp_path / "ours", buffer=buffer).load() == len(buffer) == 8
    assert call_transform(buffer, "report").running == 0, "running episodes end"


# The example


@contextlib.contextmanager
def run_example(*arguments):
    """Start the example; yield it and a function that lists the names of all its processes."""
    name, value = "STARTED_BY", str(uuid.uuid4())
    environment = {**os.environ, name: value, "PYTHONUNBUFFERED": "1"}
    command, pipe = [sys.executable, str(EXAMPLE), *arguments], subprocess.PIPE
    options = {"env": environment, "stdout": pipe, "stderr": pipe, "text": True, "start_new_session": True}
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background of a shell ignore interrupts
    with subprocess.Popen(command, preexec_fn=hear, **options) as script:
        limit = threading.Timer(300, script.kill)
        limit.start()
        try:
            yield script, partial(processes_with, f"{name}={value}")
        finally:
            limit.cancel()
            script.kill()


def processes_with(mark):
    """Return the names of the processes with an entry in their environment, by process id."""
    names = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
            if mark.encode() in (process / "environ").read_bytes():
                names[int(process.name)] = (process / "comm").read_text().strip()
    return names


def read_until(script, pattern):
    """Read what the script writes to stderr, until a pattern is found."""
    err = ""
    while not re.search(pattern, err):
        character = script.stderr.read(1)
        assert character, err
        err += character


def kill(name, script, processes):
    """Kill one of the processes with a name."""
    os.kill(next(process for process, found in processes().items() if found.startswith(name)), signal.SIGKILL)


def interrupt(script, processes):
    os.killpg(script.pid, signal.SIGINT)  # like a terminal, to all processes in the foreground


PROGRESS = r"[1-9]\d*/\d+"  # of the progress bar
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc (Linux)")


CODE_OF_THE_PAGE = """
from functools import partial

import ray, torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP
from support.pages import run_block

shares = []

def update(batch):
    shares.append(batch["hindsight", "relabelled"].float().mean())
    if "time" in names and len(shares) == first + 5:  # the block that starts collectors in the background
        ray.kill(names["collector"].remote_collectors[0])

names = {
    "capacity": 10_000,
    "policy": TensorDictModule(MLP(4, 2), ["observation"], ["action"]),
    "update": update,
    "total": 12_000,
}
# The page calls it.
ray.init = partial(ray.init, address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
try:
    run_block("how-to/ray", 0, names)
    print(len(shares), torch.stack(shares[-1000:]).mean().item())
    run_block("how-to/ray", 1, names)
    run_block("how-to/ray", 2, names | {"update": lambda batch: batch["hindsight", "relabelled"]})
    names["collector"].shutdown()
    first = len(shares)
    run_block("how-to/ray", 3, names)
    assert names["replay_buffer"].write_count >= 12_000
finally:
    ray.shutdown()
"""


@pytest.mark.slow
def test_the_code_of_the_page_relabels_and_replaces_a_killed_collector():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_ENABLE_AUTO_CONNECT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", CODE_OF_THE_PAGE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    batches, share = map(float, done.stdout.splitlines()[0].split())
    assert "transitions     6,1" in done.stdout, done.stdout  # the report
    assert "'workers': 2, 'workers_alive': 1" in done.stdout, done.stdout
    assert batches >= 100 * 6_000 / 50
    assert 0.7 < share < 0.85


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(
    ("steps", "happens", "status", "message"),
    [
        ("2000", partial(kill, "ray::Collector"), 0, "new ones are started"),
        ("100000", partial(kill, "ray::TensorDict"), 1, "The replay buffer died, and its transitions are lost"),
        ("100000", interrupt, 1, "Interrupted.\n"),
    ],
    ids=["killed collector", "killed buffer", "interrupt"],
)
def test_the_example_replaces_a_killed_collector_and_always_ends_without_leaving_a_process(
    steps, happens, status, message
):
    with run_example("--steps", steps) as (script, processes):
        read_until(script, PROGRESS)
        happens(script, processes)
        out, err = script.communicate(timeout=240)
        assert script.returncode == status, err
        assert message in err
        until = time.monotonic() + 10  # Ray's workers need time to notice the end of their cluster
        while processes() and time.monotonic() < until:
            time.sleep(0.1)
        assert not processes()
    assert status or re.search(r"Success rate of 100 greedy episodes: [01]\.\d\d\.", out), out


@pytest.mark.slow
@needs_proc
def test_the_example_replaces_the_collectors_of_a_lost_machine_once_another_one_joins():
    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        with run_example("--steps", "2000", "--address", machines.address) as (script, _):
            read_until(script, r"0/2000")  # the buffer has taken the CPU of the first machine
            lost = machines.add_node(num_cpus=2)
            read_until(script, PROGRESS)
            machines.remove_node(lost, allow_graceful=False)
            read_until(script, "new ones are started")
            machines.add_node(num_cpus=2)
            _, err = script.communicate(timeout=240)
            assert script.returncode == 0, err
    finally:
        machines.shutdown()
