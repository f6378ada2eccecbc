"""The training scripts run, and go on from their checkpoints as if they had never stopped."""

import csv
import importlib
import importlib.util
import itertools
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

pytest.importorskip("hydra", reason="the training scripts need the extra 'examples'")
pytest.importorskip("tensorboard", reason="the training scripts need the extra 'examples'")
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import capture  # noqa: E402
import common  # noqa: E402
import compare  # noqa: E402
import show  # noqa: E402
from settings import AT_LEAST_ONE, check_settings, give_anew, read_config  # noqa: E402
from training import make_adam, movement  # noqa: E402

from torchrl_her.envs import PointReach  # noqa: E402

SMALL = [
    "total_steps=400",
    "collector.steps_per_chunk=50",
    "collector.random_steps=100",
    "buffer.size=300",  # it goes round
    "batch_size=32",
    "hidden=[16]",
    "evaluation.interval=200",
    "evaluation.episodes=5",
    "evaluation.num_envs=2",
    "logger.interval=100",
    "checkpoint.interval=200",
]
TINY = [
    "total_steps=200",
    "collector.random_steps=50",
    "buffer.size=150",
    "checkpoint.interval=100",
    "evaluation.interval=100",
    "logger.interval=150",  # what was not logged yet is in the checkpoint
    "logger.kinds=[csv]",
]
BITS = ["+env.kwargs.n_bits=5", "collector.steps_per_chunk=25"]
RUNS = {
    "dqn in several environments, with priorities and windows": [
        *BITS, "env.num_envs=5", "buffer.prioritized=error", "buffer.n_steps=3", "double=true",
    ],
    "dqn that relabels what it writes, with priorities": [
        *BITS, "hindsight.when=writing", "buffer.prioritized=error", "env.num_envs=5",
    ],
    "ddpg with priorities that are movements, in bfloat16": ["buffer.prioritized=movement", "matmul_precision=medium"],
    "ddpg without hindsight": ["hindsight.enabled=false", "action_penalty=1.0"],
    "ddpg in several environments, normalized, with windows": [
        "env.num_envs=5", "normalization.enabled=true", "buffer.n_steps=3", "hindsight.strategy=final",
        "inputs=[observation,desired_goal]",
    ],
    "td3 with priorities": ["buffer.prioritized=error", "hindsight.strategy=episode"],
    "sac with quantiles": ["loss=tqc"],
    "sac in processes, normalized, with priorities": [
        "env.num_envs=2", "env.parallel=true", "normalization.enabled=true", "buffer.prioritized=error",
        "env.clip_observation=200",
        "evaluation.parallel=false",
    ],
}  # fmt: skip


def configure(script, *overrides):
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        return compose(script, overrides=[*SMALL, *overrides])


def train(script, folder, *overrides):
    return importlib.import_module(script).train(configure(script, *overrides), folder)


def state_of(training):
    """Everything that a run carries on, by name, in tensors and plain values."""
    state = dict(training.checkpoint.components)
    for name, component in state.items():
        if hasattr(component, "state_dict"):
            state[name] = component.state_dict()
    sampler = training.replay_buffer.sampler
    if hasattr(sampler, "_sum_tree"):
        sampler = state["buffer"]["_sampler"]
        rows = np.arange(len(training.replay_buffer), dtype=np.int64)
        sampler["_sum_tree"], sampler["_min_tree"] = (sampler[tree][rows] for tree in ("_sum_tree", "_min_tree"))
    return dict(flatten(state))


def flatten(value, path=()):
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from flatten(entry, (*path, key))
    elif isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            yield from flatten(entry, (*path, i))
    elif not isinstance(value, type):
        yield path, torch.as_tensor(value) if isinstance(value, (int, float, np.ndarray)) else value


def is_time(path):
    return any("seconds" in str(part) or "per_second" in str(part) for part in path)


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(run, tmp_path):
    script, overrides = run.split()[0], [*RUNS[run], *TINY]
    whole = train(script, tmp_path / "whole", *overrides)
    expected = state_of(whole)  # before another run draws
    checkpoint = tmp_path / "whole" / "checkpoints" / "checkpoint-000000000100"
    shutil.copytree(checkpoint, tmp_path / "resumed" / "checkpoints" / checkpoint.name)
    resumed = train(script, tmp_path / "resumed", *overrides, f"resume={tmp_path / 'resumed'}")
    assert whole.counters["steps"] == resumed.counters["steps"] == 200
    assert whole.counters["updates"] == resumed.counters["updates"] == 150
    found = state_of(resumed)
    assert expected.keys() == found.keys()
    assert [path for path in expected if not is_time(path) and not same(expected[path], found[path])] == []

    batches = []
    for training in (whole, resumed):
        torch.manual_seed(7)
        np.random.seed(7)  # noqa: NPY002
        batches.append(training.replay_buffer.sample(32))
    assert (batches[0] == batches[1]).all()
    share = float(batches[0]["hindsight", "relabelled"].float().mean())
    assert share == 0 if "without hindsight" in run else share > 0.4


@pytest.mark.parametrize("run", ["sac", "sac loss=tqc", "td3 buffer.prioritized=error", "ddpg action_penalty=1", "dqn"])
def test_a_recorded_update_is_bit_for_bit_the_update(run, tmp_path):
    script, *overrides = [*run.split(), *TINY, *(BITS if run == "dqn" else [])]
    expected = state_of(train(script, tmp_path / "as it is", *overrides, "capture=false"))
    found = state_of(train(script, tmp_path / "played", *overrides))
    assert expected.keys() == found.keys()
    learned = [path for path in expected if path[0] != "buffer" and not is_time(path)]  # stamps differ between buffers
    assert {"policy", "loss", "history", "rng"} < {path[0] for path in learned}
    assert [path for path in learned if not same(expected[path], found[path])] == []


def test_a_compiled_update_learns_the_same(tmp_path, monkeypatch):
    overrides = [*TINY, *BITS, "total_steps=50", "collector.random_steps=0"]
    run_as_it_is = train("dqn", tmp_path / "as it is", *overrides, "capture=false")
    compile_update, names = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda update: (names.append(update.__name__), compile_update(update))[1])
    compiled = train("dqn", tmp_path / "compiled", *overrides, "compile=true")
    assert names == ["update"]
    assert compiled.counters["updates"] == run_as_it_is.counters["updates"] == 50
    for one, other in zip(compiled.policy.parameters(), run_as_it_is.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_a_recording_does_what_the_update_does():
    """With what is given, drawn, made of numbers, kept, viewed and written."""

    class Update:
        def __init__(self):
            self.weight = nn.Parameter(torch.eye(2))
            self.network = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2, bias=False))
            nn.init.eye_(self.network[1].weight)
            self.optimizer = make_adam([self.weight, *self.network.parameters()], 0.1)
            self.enabled = torch.tensor(True)
            self.calls = 0

        def __call__(self, batch):
            self.calls += 1
            total = torch.tensor(0.5)
            total += batch["a"].sum()
            if self.enabled and torch.tensor(3.0) > 2:
                batch["b"] = batch["a"] + torch.rand(2)
            smallest, place = (self.weight.t()[:, torch.tensor([1, 0])] * batch["b"]).square().min(0)
            (smallest.sum() + self.network(batch["a"]).sum()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return TensorDict(smallest=smallest.detach(), place=place, sums=TensorDict(total=total))

    one, other = Update(), Update()
    recorded = capture.Captured(other)
    for seed in range(6):
        expected, found = ({"batch": TensorDict(a=torch.tensor([seed, 1.0]))} for _ in range(2))
        for update, outcome in ((one, expected), (recorded, found)):
            torch.manual_seed(seed)
            outcome["losses"] = update(outcome["batch"])
        assert set(found["batch"].keys()) == {"a", "b"}
        assert all((found[name] == expected[name]).all() for name in expected)
        assert torch.equal(other.weight, one.weight)
        assert torch.equal(other.network[1].weight, one.network[1].weight)
    assert other.calls == 2


def given(batch):
    return batch["a"].sum()


def written_to(batch):
    total = torch.tensor(0.0)
    total += batch["a"].sum()
    return total


def written_to_in_part(batch):
    pair = torch.tensor([0.0, 0.0])
    pair[0] = batch["a"].sum()
    return pair.sum()


def drawn(batch):
    return torch.bernoulli(torch.tensor(1.0))


@pytest.mark.parametrize("value", [given, written_to, written_to_in_part, drawn])
def test_an_update_that_asks_for_a_value_is_not_recorded(value):
    update = capture.Captured(lambda batch: batch if value(batch) > 0 else -batch)
    batch = TensorDict(a=torch.ones(3), batch_size=3)
    assert update(batch) is batch  # the first runs as it is
    with pytest.raises(RuntimeError, match="capture=false"):
        update(batch)


@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac"])
def test_the_curve_goes_on_where_it_stopped(script, tmp_path):
    overrides = BITS if script == "dqn" else []
    stopped = train(script, tmp_path, *overrides, "total_steps=200")
    before = {name: list(values) for name, values in stopped.history.items()}
    resumed = train(script, tmp_path, *overrides, f"resume={tmp_path}")
    for name, values in before.items():
        assert resumed.history[name][: len(values)] == values
    assert [step for step, _ in resumed.history["evaluation/success"]] == [0, 200, 400]
    names = ["evaluation/return", "evaluation/distance", "train/relabelled", "train/q_value"]
    names.append("train/loss" if script == "dqn" else "train/loss_actor")
    for name in names:
        with (tmp_path / "logs" / "csv" / "scalars" / f"{name}.csv").open() as file:
            rows = [(int(step), float(value)) for step, value in csv.reader(file)]
        assert rows == [(step, value) for step, value in resumed.history[name]]
        assert rows[-1][0] == 400
    assert list((tmp_path / "logs" / "tensorboard").glob("events*"))
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_the_last_step_is_evaluated_and_logged(tmp_path):
    training = train("ddpg", tmp_path, "total_steps=250")
    assert [step for step, _ in training.history["evaluation/success"]] == [0, 200, 250]
    assert [step for step, _ in training.history["time/training_seconds"]] == [100, 200, 250]


def test_a_folder_with_a_run_takes_no_other(tmp_path):
    train("ddpg", tmp_path, "total_steps=100")
    with pytest.raises(SystemExit, match=r"has a run: go on with resume="):
        train("ddpg", tmp_path, "total_steps=50", "seed=1")
    assert train("ddpg", tmp_path, "total_steps=200", f"resume={tmp_path}").config.seed == 0


@pytest.mark.parametrize(
    ("kind", "message"), [("tensorbord", "csv, tensorboard and wandb, not tensorbord"), ("wandb", "pip install wandb")]
)
def test_a_logger_that_is_not_there_leaves_a_run_as_it_is(kind, message, tmp_path):
    if kind == "wandb" and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    train("ddpg", tmp_path, "total_steps=100")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")} | {0: (tmp_path / "config.yaml").read_text()}
    with pytest.raises(SystemExit, match=message):
        train("ddpg", tmp_path, f"resume={tmp_path}", f"logger.kinds=[csv,{kind}]")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")} | {0: (tmp_path / "config.yaml").read_text()}
    assert before == after


def test_a_resumed_run_logs_what_was_last_known(tmp_path):
    overrides = [*TINY, "updates_per_step=0.02", "logger.interval=50"]
    whole = train("td3", tmp_path / "whole", *overrides)
    checkpoint = tmp_path / "whole" / "checkpoints" / "checkpoint-000000000100"
    shutil.copytree(checkpoint, tmp_path / "resumed" / "checkpoints" / checkpoint.name)
    resumed = train("td3", tmp_path / "resumed", *overrides, f"resume={tmp_path / 'resumed'}")
    assert [step for step, _ in whole.history["train/loss_actor"]] == [100, 150, 200]  # updates are at 100, 150, 200
    for name in ("train/loss_actor", "train/q_value", "train/relabelled"):
        assert resumed.history[name] == whole.history[name]


def test_what_is_no_run_or_has_no_checkpoint_is_not_resumed(tmp_path):
    with pytest.raises(SystemExit, match=r"There is no run in .*: it has no config\.yaml"):
        read_config(tmp_path)
    with pytest.raises(SystemExit, match="has no checkpoint to go on from"):
        train("ddpg", tmp_path, f"resume={tmp_path}")


def test_a_killed_run_logs_no_step_twice(tmp_path):
    train("dqn", tmp_path, *BITS)
    shutil.rmtree(tmp_path / "checkpoints" / "checkpoint-000000000400")  # as if killed just before
    (tmp_path / "checkpoints" / ".checkpoint-000000000400.stage-0").mkdir()  # and while it was being written
    resumed = train("dqn", tmp_path, *BITS, f"resume={tmp_path}")
    with (tmp_path / "logs" / "csv" / "scalars" / "train" / "loss.csv").open() as file:
        steps = [int(step) for step, _ in csv.reader(file)]
    assert steps == sorted(set(steps)) == [step for step, _ in resumed.history["train/loss"]]
    assert not list((tmp_path / "checkpoints").glob(".checkpoint-*"))


def test_the_command_line_trains_resumes_and_shows(tmp_path):
    def run(*arguments):
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert not done.returncode, done.stderr
        return done.stdout

    folder = tmp_path / "run"
    assert "200 steps" in run(EXAMPLES / "dqn.py", *SMALL, *BITS, "total_steps=200", f"hydra.run.dir={folder}")
    # The other settings are those of the run.
    assert "400 steps" in run(EXAMPLES / "dqn.py", f"resume={folder}", "total_steps=400", "hydra.run.dir=other")
    assert "400 steps" in run(EXAMPLES / "dqn.py", *SMALL, *BITS, f"resume={folder}")  # the command that it began with
    for script, given, message in (
        ("td3", [], "is one of dqn.py"),
        ("dqn", ["total_steps=500", "learning_rate=0.5"], "keeps its learning_rate: 0.001, not 0.5. It may be"),
    ):
        command = [sys.executable, EXAMPLES / f"{script}.py", f"resume={folder}", *given]
        refused = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert refused.returncode
        assert message in refused.stderr
    # What is given anew is kept, too.
    kept = OmegaConf.load(folder / "config.yaml")
    assert (kept.total_steps, kept.batch_size, kept.env.kwargs.n_bits, kept.resume) == (400, 32, 5, None)
    OmegaConf.save(OmegaConf.merge(kept, {"device": "cuda"}), folder / "config.yaml")  # it is shown on any machine
    shown = run(EXAMPLES / "show.py", folder, "--episodes", 2, "--render")
    assert "checkpoint-000000000400: 5 greedy episodes" in shown
    assert "renders nothing: the picture shows goals" in shown
    assert "success" in shown
    assert (folder / "episodes.png").stat().st_size > 5_000


def test_a_resumed_run_takes_what_is_given_and_no_more():
    def given(*overrides):
        with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
            return compose("dqn", overrides=list(overrides)), list(overrides)

    began = ["+task=bit_flipping_50", "seed=3"]
    run, _ = given(*began, "batch_size=512", "exploration.random_actions=0.5")
    give_anew(run, *given(*began, "total_steps=600_000", "evaluation.episodes=7", "resume=folder"))
    assert (run.total_steps, run.evaluation.episodes, run.resume) == (600_000, 7, "folder")
    assert (run.batch_size, run.exploration.random_actions, run.evaluation.interval) == (512, 0.5, 50_000)
    for overrides, message in (
        (began[:1], "keeps its seed: 3, not 0. It may be given resume, total_steps, "),
        (["gamma=0.5"], "keeps its gamma: 0.98, not 0.5"),
        (["env.num_envs=4"], "keeps its env.num_envs: 16, not 4"),
    ):
        with pytest.raises(SystemExit, match=message):
            give_anew(run, *given(*overrides))


def test_runs_that_hydra_makes_are_compared(tmp_path):
    def run(*arguments):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=True).stdout

    sweep = ["seed=1,2", "hindsight.strategy=future,final", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    run(EXAMPLES / "dqn.py", "--multirun", *SMALL, *BITS, "total_steps=200", *sweep)
    compared = run(
        EXAMPLES / "compare.py", "sweep", "--by", "hindsight.strategy", "--panels", "env.name", "--title", "Strategies"
    )
    final, future = (
        {run.config.seed: run.logs["success"] for run in runs}
        for _, runs in itertools.groupby(sorted(compare.find_runs([tmp_path]), key=strategy_of), key=strategy_of)
    )
    for name, runs in (("final", final), ("future", future)):
        assert runs.keys() == {1, 2}
        last = [float(logged[-1, 1]) for logged in runs.values()]
        assert f"| strategy {name}, name torchrl_her/BitFlipping-v0 | 2 | {sum(last) / 2:.2f} (" in compared
    assert "At 200 environment steps" in compared
    assert (tmp_path / "sweep" / "comparison.png").stat().st_size > 5_000


def strategy_of(run):
    return run.config.hindsight.strategy


def test_what_a_comparison_says_is_the_median_and_range_at_a_step():
    runs = [
        compare.Run(None, {name: np.array([[0, 0.1], [100, value], [200, 1.0]]) for name in compare.METRICS})
        for value in (0.25, 0.5, 1.0)
    ]
    assert "| group | 3 | 0.50 (0.25 to 1.00) | 0.500 | 0 |" in compare.table({"group": runs}, 150)
    assert "| group | 3 | 1.00 (1.00 to 1.00) | 1.000 | 1 |" in compare.table({"group": runs}, 200)
    steps, success = compare.curves(runs)
    assert steps.tolist() == [0, 100, 200]
    assert success.tolist() == [[0.1, 0.25, 1.0], [0.1, 0.5, 1.0], [0.1, 1.0, 1.0]]


def test_runs_that_were_evaluated_at_other_steps_are_compared_where_they_agree():
    logs = [np.array([[0, 0.0], [50, 0.2], [100, 0.4]]), np.array([[0, 0.1], [100, 0.5], [150, 0.6]])]
    runs = [compare.Run(None, dict.fromkeys(compare.METRICS, log)) for log in logs]
    steps, success = compare.curves(runs)
    assert steps.tolist() == [0, 100]
    assert success.tolist() == [[0.0, 0.4], [0.1, 0.5]]
    assert np.isnan(compare.Run(None, {"seconds": np.array([[500, 3.0]])}).at("seconds", 100))


def test_an_entry_that_no_configuration_has_is_not_compared():
    runs = [compare.Run(configure(script), {}) for script in ("sac", "ddpg")]
    compare.check_entries(runs, ["resume", "loss"])
    assert [run.group(["loss", "hindsight.strategy"]) for run in runs] == [
        "loss sac, strategy future", "loss None, strategy future",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match=r"No run has an entry 'hindsight\.stragety'"):
        compare.check_entries(runs, ["hindsight.stragety"])


def test_without_runs_a_comparison_says_so(tmp_path):
    with pytest.raises(SystemExit, match="There is no run with CSV logs below"):
        compare.find_runs([tmp_path])


class OtherRewards(PointReach):
    """Success is a plain bool under another name, which resets do not tell; the goal earns 1."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}

    def step(self, action):
        *transition, info = super().step(action)
        return *transition, {"at_goal": bool(info["is_success"])}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return super().compute_reward(achieved_goal, desired_goal, info) + 1


class OtherSpaces(PointReach):
    """Acts in another space, and tells of goals in another dtype, in tenths."""

    def __init__(self, *, actions=None, dtype="float32"):
        super().__init__()
        self.dtype = dtype
        for name in ("achieved_goal", "desired_goal"):
            self.observation_space.spaces[name] = gymnasium.spaces.Box(0, 20, (2,), np.dtype(dtype).type)
        if actions is not None:
            self.action_space = ACTIONS[actions]

    def _observation(self):
        goals = ("achieved_goal", "desired_goal")
        found = super()._observation()
        return found | {name: (10 * found[name] + 10).astype(self.dtype) for name in goals}


class OtherScale(gymnasium.Wrapper):
    """Rewards around another environment: ``scale * reward + shift``."""

    def __init__(self, scale=1.0, shift=0.0):
        super().__init__(PointReach())
        self.scale, self.shift = scale, shift

    def step(self, action):
        state, reward, *rest = super().step(action)
        return state, self.scale * reward + self.shift, *rest

    def compute_reward(self, *goals_and_info):
        return self.scale * self.unwrapped.compute_reward(*goals_and_info) + self.shift


ACTIONS = {
    "wide": gymnasium.spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32)),
    "boundless": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "pairs": gymnasium.spaces.MultiDiscrete([3, 3]),
    "from one on": gymnasium.spaces.Discrete(4, start=1),
}
gymnasium.register("OtherRewards-v0", OtherRewards, max_episode_steps=50)
gymnasium.register("OtherSpaces-v0", OtherSpaces, max_episode_steps=50)
gymnasium.register("OtherScale-v0", OtherScale, max_episode_steps=50)
gymnasium.register("Endless-v0", PointReach)


TASKS = {
    "bit_flipping_50": ["dqn"], "fetch": ["ddpg", "td3", "sac"], "fetch_ddpg": ["ddpg"], "fetch_push": ["ddpg"],
    "fetch_reach": ["td3", "sac"],
}  # fmt: skip


def test_all_tasks_are_tested():
    assert sorted(TASKS) == sorted(path.stem for path in (EXAMPLES / "config" / "task").glob("*.yaml"))


@pytest.mark.parametrize(("task", "script"), [(task, script) for task, scripts in TASKS.items() for script in scripts])
def test_a_task_is_a_whole_configuration(task, script):
    with initialize_config_dir(str(EXAMPLES / "config"), version_base="1.3"):
        config = compose(script, overrides=[f"+task={task}"])
    check_settings(config)
    assert config.total_steps % config.evaluation.interval == 0


def test_environments_of_other_packages_are_named_with_their_module():
    config = configure("ddpg", "env.name=torchrl_her.envs:torchrl_her/PointReach-v0", "buffer.size=1000")
    assert common.make_hindsight(config).capacity == 1000 + 100  # episodes of 50 steps
    config = configure("ddpg", "env.name=OtherRewards-v0", "+env.kwargs.max_episode_steps=64", "buffer.size=1000")
    assert common.make_hindsight(config).capacity == 3000 + 100


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        ("ddpg", "CartPole-v1", r"not a goal environment.*\['achieved_goal', 'desired_goal'"),
        ("ddpg", "torchrl_her/PointReach-v7", r"'torchrl_her/PointReach-v7' cannot be made: .*"),
        ("ddpg", "no_such_module:Env-v0", r"'no_such_module:Env-v0' cannot be made: No module named"),
        ("sac", "torchrl_her/BitFlipping-v0", r"Actions of .* are numbers: train it with dqn\.py"),
        ("dqn", "torchrl_her/PointReach-v0", r"Actions of .* are vectors: train it with ddpg\.py"),
        ("dqn", "OtherSpaces-v0 +env.kwargs.actions=pairs", r"are MultiDiscrete.*one of the numbers from 0 on"),
        ("dqn", "OtherSpaces-v0 '+env.kwargs.actions=from one on'", r"are Discrete\(4, start=1\).*numbers from 0 on"),
        ("ddpg", "OtherSpaces-v0 +env.kwargs.actions=boundless", r"Actions of OtherSpaces-v0 have no bounds"),
        ("td3", "OtherSpaces-v0 +env.kwargs.actions=boundless", r"Actions of OtherSpaces-v0 have no bounds"),
    ],
)
def test_environments_that_a_script_cannot_train_in_are_refused(script, env, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train(script, tmp_path, *shlex.split(f"env.name={env}"))


@pytest.mark.parametrize("script", ["ddpg", "td3", "sac"])
def test_actions_may_have_bounds_of_their_own(script, tmp_path):
    training = train(script, tmp_path, "env.name=OtherSpaces-v0", "+env.kwargs.actions=wide", *TINY)
    actions = training.replay_buffer.storage[:]["action"]
    assert (actions >= torch.tensor([-2.0, 0.0])).all()
    assert (actions <= torch.tensor([2.0, 1.0])).all()
    assert (actions[:, 0] > 1).any(), "one that is between no other bounds"


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8"])
def test_goals_may_be_of_any_dtype(dtype, tmp_path):
    training = train("ddpg", tmp_path, "env.name=OtherSpaces-v0", f"+env.kwargs.dtype={dtype}", *TINY)
    assert training.history["evaluation/distance"][-1][1] > 0
    assert training.history["evaluation/success"][-1][0] == 200


def test_an_evaluation_that_does_not_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "LONGEST_EPISODE", 60)
    with pytest.raises(SystemExit, match=r"did not end in 60 steps: .*\+env\.kwargs\.max_episode_steps="):
        train("ddpg", tmp_path, "env.name=Endless-v0")
    train("ddpg", tmp_path / "other", "env.name=Endless-v0", "+env.kwargs.max_episode_steps=50", *TINY)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+env.kwargs.shift=1.0"], "OtherScale-v0 gives 1 at the goal and 0 elsewhere: use clip_target=false"),
        (["+env.kwargs.scale=10.0"], "OtherScale-v0 gives 0 at the goal and -10 elsewhere: use clip_target=false"),
    ],
)
def test_targets_of_other_rewards_are_not_clipped(overrides, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train("ddpg", tmp_path, "env.name=OtherScale-v0", *overrides)
    training = train("ddpg", tmp_path / "other", "env.name=OtherScale-v0", *overrides, "clip_target=false", *TINY)
    batch = training.replay_buffer.sample(1000)
    reached = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True) <= 0.05
    assert torch.equal(batch["next", "reward"] == training.reward_at_goal, reached)


def test_success_may_have_another_name_and_be_a_bool(tmp_path):
    overrides = ["env.name=OtherRewards-v0", "env.success=at_goal", "clip_target=false"]
    training = train("ddpg", tmp_path, *overrides, "total_steps=200")
    assert training.reward_at_goal == 1.0
    assert 0 <= training.history["evaluation/success"][-1][1] <= 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["clip_target=false"], r"no info entry 'is_success', but \['at_goal'\].*env\.success="),
        (["env.success=at_goal"], "gives 1 at the goal and 0 elsewhere: use clip_target=false"),
    ],
)
def test_environments_that_the_settings_do_not_fit_are_refused(overrides, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train("ddpg", tmp_path, "env.name=OtherRewards-v0", *overrides)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac"])
def test_a_script_trains_on_the_device(script, tmp_path):
    training = train(script, tmp_path, *(BITS if script == "dqn" else ["normalization.enabled=true"]), "device=cuda")
    assert training.history["evaluation/success"][-1][0] == 400
    assert training.replay_buffer.sample(32).device.type == "cuda"


def test_what_is_shown_is_what_was_trained(tmp_path):
    overrides = ["normalization.enabled=true"]
    training = train("ddpg", tmp_path, *overrides)
    policy = show.load_policy(configure("ddpg", *overrides), show.find_checkpoint(tmp_path, None))
    evaluation = common.Evaluation(configure("ddpg", *overrides))
    outcomes = evaluation(policy)
    evaluation.close()
    for name, values in outcomes.items():
        assert float(values.float().mean()) == training.history[f"evaluation/{name}"][-1][1]
    for render in (False, True):
        env = common.make_env(configure("ddpg").env, **(show.PIXELS if render else {}))
        seed = common.EVALUATION_SEED
        for distance in outcomes["distance"].tolist():  # the episodes of the table
            episode, seed = show.play(env, policy, seed, success="is_success")
            assert episode["achieved_goal"].shape == (51, 2)
            assert ("frames" in episode) == render
            assert np.linalg.norm(episode["achieved_goal"][-1] - episode["desired_goal"]) == pytest.approx(distance)


def test_an_evaluation_is_of_the_episodes_last_steps_and_always_the_same():
    """Against a loop over single Gymnasium environments, with a policy that flips the first wrong bit."""
    config = configure("dqn", "+env.kwargs.n_bits=6", "evaluation.episodes=7", "evaluation.num_envs=3")
    flips = TensorDictModule(
        lambda now, goal: torch.where(torch.rand(now.shape[:-1]) < 0.2, 0, (now != goal).int().argmax(-1)),
        ["observation", "desired_goal"],
        ["action"],
    )
    evaluation = common.Evaluation(config)
    torch.manual_seed(0)
    first = evaluation(flips)
    assert first["success"].shape == (7,)
    assert ((first["distance"] == 0) == (first["success"] == 1)).all()  # it terminates there
    # -1 for each step but a last one that reaches the goal
    assert torch.equal(first["return"], -first["length"].float() + first["success"])
    assert len(set(first["length"].tolist())) > 1
    torch.manual_seed(0)
    assert all(torch.equal(values, first[name]) for name, values in evaluation(flips).items())
    evaluation.close()


def test_targets_of_ddpg_are_clipped():
    ddpg = importlib.import_module("ddpg")
    config = configure("ddpg", "gamma=0.9")
    env = common.make_env(config.env)
    actor, critic = ddpg.make_networks(config, env, list(config.inputs))
    batch = env.rollout(50)
    for bias in (100.0, -100.0):
        torch.nn.init.constant_(list(critic.parameters())[-1], bias)  # of the value itself
        clipped = ddpg.make_loss(config, actor, critic)(batch.clone())["target_value"]
        free = ddpg.make_loss(configure("ddpg", "gamma=0.9", "clip_target=false"), actor, critic)(batch.clone())
        assert clipped.max() <= 0
        assert clipped.min() >= -10.0001
        assert free["target_value"].abs().max() > 80


@pytest.mark.parametrize("when", ["sampling", "writing"])
def test_without_hindsight_nothing_is_relabelled(when, tmp_path):
    training = train("ddpg", tmp_path, "hindsight.enabled=false", f"hindsight.when={when}")
    assert len(training.replay_buffer) == 300
    assert not training.replay_buffer.sample(300)["hindsight", "relabelled"].any()


def test_the_priority_of_movement_is_the_way_of_the_achieved_goal_in_the_episode():
    generator = torch.Generator().manual_seed(0)
    ids, states = torch.tensor([7, 7, 3, 3, 3, 9]), torch.rand(6, 2, 3, generator=generator)
    states[5, 1] = states[5, 0]
    data = TensorDict({"collector": {"traj_ids": ids}, "achieved_goal": states[:, 0]}, [6])
    data["next", "achieved_goal"] = states[:, 1]
    ways = {int(each): 0.0 for each in ids}
    for each, (start, end) in zip(ids.tolist(), states.tolist(), strict=True):
        ways[each] += sum((b - a) ** 2 for a, b in zip(start, end, strict=True)) ** 0.5
    found = movement(data, far=1.0)
    assert found.tolist() == pytest.approx([0.05 + min(ways[int(each)], 1.0) for each in ids], rel=1e-5)
    assert {round(way, 3) >= 1 for way in ways.values()} == {True, False}, "a way that counts in full, and another"


def test_what_moves_is_sampled_more_often(tmp_path):
    run = train("ddpg", tmp_path, "buffer.prioritized=movement", "buffer.alpha=1", "buffer.beta=0", "buffer.far=10")
    chunks = run.replay_buffer.storage[:].split(50)
    stored = torch.cat([movement(chunk, far=10) for chunk in chunks])
    sampled = stored[torch.cat([run.replay_buffer.sample(32)["index"] for _ in range(1000)])]
    plain, prioritized = stored.mean(), stored.square().mean() / stored.mean()
    assert abs(sampled.mean() - prioritized) < 0.2 * (prioritized - plain)


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_a_setting_that_has_to_be_one_or_more_is_named(name, tmp_path):
    with pytest.raises(SystemExit, match=rf"{name}=0 has to be 1 or more"):
        train("td3", tmp_path, f"{name}=0")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inputs=[]", r"inputs are some of observation, achieved_goal, desired_goal, not \[\]"),
        ("inputs=observation", r"inputs is a list: inputs=\[observation,desired_goal\], say"),
        ("batch_size=null", "batch_size=None has to be 1 or more"),
        ("env.num_envs=two", "env.num_envs=two has to be 1 or more"),
        ("logger.kinds=null", r"logger\.kinds is a list: \[csv\], say, or \[\]"),
        ("inputs=[observation,desired]", r"inputs are some of .* not \['observation', 'desired'\]"),
        ("logger.kinds=csv", r"logger\.kinds is a list: \[csv\], say, or \[\]"),
        ("logger.kinds=[table]", "logger.kinds are csv, tensorboard and wandb, not table"),
    ],
)
def test_a_setting_that_cannot_be_is_named(override, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train("ddpg", tmp_path, override)


def test_a_folder_takes_one_run_also_before_its_first_checkpoint(tmp_path):
    (tmp_path / "config.yaml").touch()  # of a run that has just begun, or was killed
    with pytest.raises(SystemExit, match="has a run that has no checkpoint: delete it, or name another folder"):
        train("ddpg", tmp_path)
    with pytest.raises(SystemExit, match="has no checkpoint to go on from: delete it and start anew"):
        train("ddpg", tmp_path, f"resume={tmp_path}")


def test_a_run_does_not_go_back(tmp_path):
    train("ddpg", tmp_path, *TINY)
    with pytest.raises(SystemExit, match="has 200 steps already: give it more total_steps"):
        train("ddpg", tmp_path, *TINY, "total_steps=100", f"resume={tmp_path}")
    assert read_config(tmp_path).total_steps == 200


def test_no_update_is_lost_to_rounding(tmp_path):
    training = train("ddpg", tmp_path, *TINY, "updates_per_step=0.82")
    assert training.counters["updates"] == 123  # 0.82 * 150 is a little less


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["buffer.n_steps=3", "hindsight.when=writing"], "Returns of several steps need hindsight.when=sampling"),
        (["buffer.prioritized=true"], "is null, 'error' or 'movement', not True"),
        (["buffer.prioritized=movement", "buffer.n_steps=3"], "needs a row of the buffer for each step"),
        (["buffer.prioritized=movement", "hindsight.when=writing"], "needs a row of the buffer for each step"),
    ],
)
def test_priorities_that_cannot_be_are_refused(overrides, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train("ddpg", tmp_path, *overrides)


def test_another_loss_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="loss is 'sac' or 'tqc', not 'tcq'"):
        train("sac", tmp_path, "loss=tcq")


@pytest.mark.parametrize("her_ratio", [0.0, 0.3, 0.7, 1.0])
def test_a_share_that_no_number_of_copies_makes_is_refused(her_ratio, tmp_path):
    with pytest.raises(SystemExit, match=rf"her_ratio = k / \(k \+ 1\), not {her_ratio}"):
        train("ddpg", tmp_path, "hindsight.when=writing", f"hindsight.her_ratio={her_ratio}")


def test_targets_without_a_lowest_value_are_not_clipped(tmp_path):
    with pytest.raises(SystemExit, match="no lowest value to clip to: use clip_target=false"):
        train("ddpg", tmp_path, "gamma=1")


def test_another_time_of_relabelling_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"hindsight\.when is 'sampling' or 'writing', not 'write'"):
        train("ddpg", tmp_path, "hindsight.when=write")


def test_goals_have_one_statistic_and_both_places_normalize_alike():
    config = configure("ddpg", "normalization.enabled=true", "inputs=[observation,achieved_goal,desired_goal]")
    env = common.make_env(config.env)
    normalization = common.Normalization(config, env)
    rb, _ = common.make_replay_buffer(config, normalization)
    policy = TensorDictSequential(*normalization.when_acting())
    seen, observations = [], []
    for seed in range(4):
        env.set_seed(seed)
        data = env.rollout(50)
        rb.extend(data)
        normalization.update(data)
        seen += [data["desired_goal"], data["next", "achieved_goal"]]
        observations.append(data["observation"])
    for key, values in (("desired_goal", torch.cat(seen)), ("observation", torch.cat(observations))):
        moments = normalization.moments[key]
        torch.testing.assert_close(moments.loc, values.mean(0))
        torch.testing.assert_close(moments.scale, values.std(0, correction=0))
    batch = rb.sample(500)
    for where in (batch, batch["next"]):
        acted = policy(where.select("observation", "achieved_goal", "desired_goal"))
        for key in ("observation", "achieved_goal", "desired_goal"):
            moments = normalization.moments["observation" if key == "observation" else "desired_goal"]
            expected = ((where[key] - moments.loc) / moments.scale).clamp(-5, 5)
            torch.testing.assert_close(where[f"normalized_{key}"], expected)
            assert torch.equal(acted[f"normalized_{key}"], where[f"normalized_{key}"])
    reached = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1) <= 0.05
    assert torch.equal(batch["next", "reward"].squeeze(-1) == 0, reached)  # goals stay raw


def test_updates_and_intervals_are_exact(tmp_path):
    training = train("ddpg", tmp_path, "updates_per_step=0.25", "collector.random_steps=150")
    assert training.counters["updates"] == (400 - 150) // 4
    with pytest.raises(
        SystemExit, match=r"evaluation.interval=120 has to be a multiple of collector.steps_per_chunk=50"
    ):
        train("ddpg", tmp_path / "other", "evaluation.interval=120")
    with pytest.raises(SystemExit, match=r"collector.random_steps=120 has to be a multiple"):
        train("ddpg", tmp_path / "other", "collector.random_steps=120")


def test_a_missing_environment_says_what_to_install():
    try:
        gymnasium.spec("FetchReach-v4")
    except gymnasium.error.Error:
        with pytest.raises(SystemExit, match="gymnasium-robotics mujoco"):
            common.make_env(configure("sac", "+task=fetch").env)
    else:
        assert common.make_env(configure("sac", "+task=fetch").env).action_spec.shape == (4,)
