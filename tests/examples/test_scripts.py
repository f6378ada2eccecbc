"""Data collection, writing, sampling, updates and evaluation of the training scripts."""

import importlib
import itertools
import re
import warnings

import ddpg
import gymnasium
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from pytest_examples import find_examples
from script_runs import EXAMPLES, configure, differences, state_of, train
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded
from training import environments, parts
from training.record import Recorded
from training.settings import STRATEGIES, Settings

from support.pages import DOCS, python_blocks
from torchrl_her.envs import BitFlipping
from torchrl_her.goals import strategies

REFUSED = {
    "td3 gamma=2 seed=-1": r"seed=-1: Input should be .*\ngamma=2\.0: Input should be less than or equal to 1\.",
    "td3 total_steps=120": r"total_steps=120 must be a multiple of collector\.steps_per_chunk=50",
    "ddpg collector.random_steps=200": "collector.random_steps=200 must be less than total_steps=200",
    "ddpg batch_size=151": r"buffer\.size=150 must be at least 151, the size of a chunk or batch",
    "ddpg env.name=torchrl_her/PointReach-v7": r"v7' cannot be made: .*gymnasium-robotics mujoco",
    "dqn env.name=CartPole-v1 env.success=terminated": "needs a goal environment",
    "ddpg inputs=[observation]": "must include the desired goal, 'desired_goal'",
    "sac env.name=torchrl_her/BitFlipping-v0": r"are Discrete\(15\)\. .*the others a bounded, flat Box",
    "ddpg env.info_keys=[fuel]": r"\['fuel'\] must be .* which has \['is_success', 'terminated'\]: return them",
    "ddpg env.goal_fn=no_such_module:goal": "No module named 'no_such_module'",
    "ddpg hindsight.strategy=future+finale": "Unknown strategy 'finale': use one of current, .* joined by [+]",
    "td3 hindsight.when=writing hindsight.her_ratio=0.7": r"hindsight.her_ratio must be k / \(k \+ 1\)",
    "ddpg hindsight.when=writing": "needs goals.selection=null and buffer.prioritized=null or error",
    "sac loss=tqc dropped_quantiles=25": "dropped_quantiles must be less than quantiles=25",
    f"td3 env.name={__name__}:Dense-v0": r"\['is_success'\] must be in every .* Only a sparse reward can replace",
    "ddpg gamma=1": "Input should be less than 1",
    f"td3 env.name={__name__}:Endless-v0 ~env.kwargs.max_episode_steps": "Set gamma: it follows .* does not limit",
}


@pytest.mark.parametrize("command", REFUSED)
def test_impossible_settings_are_refused_and_nothing_is_written(command, tmp_path):
    with pytest.raises((SystemExit, TypeError, ValueError, ImportError), match=REFUSED[command]):
        train(command, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_stores_whole_episodes_needs_one_before_the_first_update(tmp_path):
    with pytest.raises(SystemExit, match=r"none ended in the first 100 steps: increase collector\.random_steps"):
        train("td3 hindsight.when=writing env.num_envs=10", tmp_path)


def test_each_task_is_a_whole_configuration():
    scripts = {
        "bit_flipping_50": "dqn", "fetch": "ddpg td3 sac", "fetch_ddpg": "ddpg", "fetch_push": "ddpg",
        "fetch_reach": "td3 sac", "fetch_slide": "ddpg", "hand_reach": "ddpg", "panda_pick_and_place": "ddpg",
        "plain_ddpg": "ddpg",
        "point_maze": "sac td3", "point_maze_corners": "sac", "point_maze_medium": "sac",
    }  # fmt: skip
    for task in (EXAMPLES / "config" / "task").glob("*.yaml"):
        for script in scripts.pop(task.stem).split():
            config = configure(script, f"+task={task.stem}")
            assert config.total_steps % config.evaluation.interval == 0
    assert not scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "lowest", "highest"),
    [("seed=0", 0.95, 1.0), ("buffer.prioritized=error", 0.95, 1.0), ("hindsight.her_ratio=0", 0.0, 0.1)],
)
def test_dqn_flips_15_bits_with_hindsight_and_not_without(setting, lowest, highest, tmp_path):
    """Plain DQN cannot do it. The other settings are the script's own."""
    config = configure("dqn", setting, "evaluation.interval=5000", "evaluation.episodes=200")
    run = importlib.import_module("dqn").train(config, tmp_path)
    assert lowest <= run.components["log"]["evaluation/success"][-1][1] <= highest


@pytest.mark.gpu
@pytest.mark.parametrize("speedup", ["none", "record", "cudagraph"])
@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac", "sac loss=tqc"])
def test_a_script_trains_on_the_device(script, speedup, tmp_path):
    run = train(f"{script} device=cuda speedup={speedup} normalization.enabled={script != 'dqn'}", tmp_path)
    assert run.components["log"]["evaluation/success"][-1][0] == 200
    assert run.components["buffer"].sample(32).device.type == "cuda"


@pytest.mark.parametrize("run", ["sac", "td3 buffer.prioritized=error", "ddpg average=0.9", "dqn"])
def test_a_recorded_update_is_bit_for_bit_the_eager_one(run, tmp_path):
    steps = "total_steps=100 buffer.size=100"
    expected = state_of(train(f"{run} {steps} speedup=none", tmp_path / "eager"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="speedup=record")
        found = state_of(train(f"{run} {steps}", tmp_path / "recorded"))
    # Stamps begin with a random number for each buffer.
    assert [path for path in differences(expected, found) if "['table']" not in path] == []


def test_a_function_that_reads_a_value_of_its_batch_runs_eagerly_with_a_warning():
    recorded = Recorded(lambda batch: batch if batch["a"].sum() + torch.rand(()) / 10 > 0 else -batch)
    for number, expected in enumerate([1, 1, -1, 1, -1]):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            batch = recorded(TensorDict(a=expected * torch.ones(3), batch_size=3))
        assert (batch["a"] == 1).all()  # the absolute value
        assert ["speedup=record: not recorded" in str(warning.message) for warning in found] == [True] * (number == 1)


def test_updates_are_exact_and_keep_the_number_of_threads_when_environments_are_closed(tmp_path, monkeypatch):
    """0.82 * 150 is a little less than 123 in floating point."""
    threads = []
    counted = lambda function: lambda batch: threads.append(torch.get_num_threads()) or function(batch)  # noqa: E731
    monkeypatch.setattr("training.parts.Recorded", counted)
    run = train("ddpg env.num_envs=5 updates_per_step=0.82", tmp_path)
    steps = run.components["critic_optimizer"].state_dict()["state"].values()
    assert {int(state["step"]) for state in steps} == {123}
    assert set(threads) == {1}


def test_the_average_of_the_policy_is_saved(tmp_path):
    """With tau = 1 - average, it is the target network."""
    run = train("ddpg average=0.9 tau=0.1", tmp_path)
    target = run.components["loss"].target_actor_network_params.data
    saved = TensorDict.from_module(run.components["policy"][1:]).data
    for name, weights in saved.items(True, True):
        torch.testing.assert_close(weights, target[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_targets_of_ddpg_are_clipped_and_large_actions_have_a_penalty(bias):
    torch.set_float32_matmul_precision("highest")
    config = configure("ddpg", "gamma=0.9")
    env = environments.make_env(config.env)
    inputs = parts.make_inputs(config, env)
    actor = ddpg.make_policy(config, env, inputs)[1:]
    critic = ddpg.make_critic(config, env, inputs)
    torch.nn.init.constant_(list(critic.parameters())[-1], bias)  # of the value itself
    batch = inputs(env.rollout(50))
    clipped, free, penalized = (
        ddpg.make_loss(configure("ddpg", "gamma=0.9", "reward_scale=2", *each), actor, critic)(batch.clone())
        for each in (["action_penalty=0", "reward_range=[-1,0.5]"], ["action_penalty=0"], ["action_penalty=0.7"])
    )
    assert free["target_value"].abs().max() > 80
    torch.testing.assert_close(clipped["target_value"], free["target_value"].clamp(-20, 10))
    total = clipped["loss_actor"] + 0.7 * (actor(batch.select("inputs"))["action"] ** 2).mean()
    torch.testing.assert_close(penalized["loss_actor"], total)
    found, expected = (torch.autograd.grad(each, [*actor.parameters()]) for each in (penalized["loss_actor"], total))
    torch.testing.assert_close(found, expected)


def test_hindsight_that_is_disabled_relabels_and_writes_nothing_more(tmp_path):
    run = train("td3 buffer.size=2000 hindsight.when=writing hindsight.enabled=false", tmp_path)
    buffer = run.components["buffer"]
    assert (len(buffer), int(buffer.sample(200)["hindsight", "relabelled"].sum())) == (200, 0)


def test_training_episodes_pursue_achieved_goals_and_explore_at_them(tmp_path):
    settings = "goals.selection=uniform goals.share=1 goals.start=30 total_steps=400 buffer.size=400"
    run = train(f"td3 {settings} logger.interval=50", tmp_path)
    assert run.components["goals"].report().selected > 10
    stored = run.buffer.storage[:]
    selected = stored["goal_selection", "selected"].squeeze(-1)
    achieved = {tuple(goal) for goal in stored["next", "achieved_goal"].tolist()}
    pursued = [tuple(goal) in achieved for goal in stored["desired_goal"].tolist()]
    assert pursued == selected.tolist()
    assert not train("ddpg hindsight.enabled=false", tmp_path / "without").components.get("goals")

    explore = parts.explore_at_goals(Bounded(-1, 1, (4, 2)), 0.5)
    steps = torch.tensor([[0], [2], [0], [5]])
    acted = explore(TensorDict({"action": torch.full((4, 2), 7.0), "goal_selection": {"steps_at_goal": steps}}, 4))
    assert (acted["action"] == 7).all(1).tolist() == [True, False, True, False]


def test_components_of_actions_are_random_for_a_share_of_the_steps_and_repeated():
    explore = parts.RepeatedActions(Bounded(-1, 1, (50, 2)), 5, eps_init=0.4, eps_end=0.4, annealing_num_steps=1)
    given = TensorDict({"action": torch.full((50, 2), 7.0)}, 50)
    acted = torch.stack([explore(given.copy())["action"] for _ in range(2000)])  # [steps, environments, 2]
    assert (acted[200:] != 7).float().mean() == pytest.approx(0.4, abs=0.02)
    assert (acted[200:] != 7).all(-1).float().mean() == pytest.approx(0.16, abs=0.02)  # both components
    actions = [list(repeated) for env in acted.flatten(1).T.tolist() for _, repeated in itertools.groupby(env)]
    lengths = [len(repeated) for repeated in actions if repeated[0] != 7]
    assert [lengths.count(steps) / len(lengths) for steps in range(1, 6)] == pytest.approx([0.2] * 5, abs=0.02)
    explore.stop()
    explore.eps.zero_()
    assert (explore(given.copy())["action"] == 7).all()


def test_the_folder_of_a_run_has_neither_colon_nor_slash():
    pattern = Settings().hydra["run"]["dir"].partition("/${now")[0]
    for name in ("panda:PandaReachFixed-v3", "torchrl_her/PointReach-v0", "torchrl_her.envs:torchrl_her/PointReach-v0"):
        config = OmegaConf.create({"dir": pattern, "algorithm": "td3", "env": {"name": name}})
        assert config.dir == "outputs/td3/" + name.replace(":", "-").replace("/", "-")


def test_the_settings_know_the_strategies_of_the_package():
    assert set(STRATEGIES) == set(strategies.STRATEGIES)


class Line(gymnasium.Env):
    """A point on a line, whose info says nothing. The reward has two values, or is the negative distance."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,))
    observation_space = gymnasium.spaces.Dict(
        {key: gymnasium.spaces.Box(-1, 1, (1,)) for key in ("observation", "achieved_goal", "desired_goal")}
    )

    def __init__(self, values=None):
        self.values = values

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.goal = self.np_random.uniform(-1, 1, (2, 1)).astype(np.float32)
        return self.observe(), {}

    def observe(self):
        return {"observation": self.place, "achieved_goal": self.place, "desired_goal": self.goal}

    def step(self, action):
        self.place = (self.place + 0.5 * action).clip(-1, 1).astype(np.float32)
        return self.observe(), float(self.compute_reward(self.place, self.goal, {})), False, False, {}

    def compute_reward(self, achieved_goal, desired_goal, info):
        distance = np.abs(achieved_goal - desired_goal).squeeze(-1)
        return -distance if self.values is None else np.where(distance < 0.3, self.values[1], self.values[0])


gymnasium.register("Endless-v0", Line, kwargs={"values": (-1, 0)})
for kind, values in {"Sparse": (-1, 0), "Positive": (0, 10), "Dense": None}.items():
    gymnasium.register(f"{kind}-v0", Line, kwargs={"values": values})


@pytest.mark.parametrize("kind", ["Sparse", "Positive"])
@pytest.mark.parametrize("more", ["", "env.num_envs=5"])
def test_a_sparse_reward_says_whether_a_goal_is_reached_if_info_does_not(kind, more, tmp_path):
    run = train(f"td3 env.name={__name__}:{kind}-v0 {more}", tmp_path)
    stored = run.buffer.storage[:]
    reached = (stored["next", "achieved_goal"] - stored["desired_goal"]).abs() < 0.3
    assert 0 < reached.sum() < len(reached)
    assert torch.equal(stored["next", "is_success"].reshape(-1, 1).bool(), reached)
    outcomes = run.evaluate(run.policy)
    assert torch.equal(outcomes["success"].bool(), outcomes["distance"] < 0.3)


def test_settings_that_are_null_follow_from_the_environment(tmp_path):
    positive = f"env.name={__name__}:Positive-v0"
    run = train(f"ddpg {positive} env.kwargs.max_episode_steps=100", tmp_path / "positive")
    config = OmegaConf.load(tmp_path / "positive" / "config.yaml")
    assert (config.gamma, config.env.success, list(config.reward_range)) == (0.975, "is_success", [0.0, 10.0])
    assert config.reward_scale == pytest.approx(20 * 0.025 / 10)
    assert config.buffer.far == pytest.approx(2 / 3, abs=0.05)  # of goals between -1 and 1
    assert (config.exploration.noise, config.exploration.random_actions) == (0.4, 0.3)  # of one component
    assert set(run.buffer.sample(1000)["next", "reward"].flatten().tolist()) == {0.0, 0.5}
    train(f"ddpg env.name={__name__}:Dense-v0 env.success=terminated", tmp_path / "dense")
    config = OmegaConf.load(tmp_path / "dense" / "config.yaml")
    assert (config.gamma, config.reward_range, config.reward_scale) == (0.9, None, None)
    exponents = {"ddpg": (1.0, 0.0), "ddpg buffer.prioritized=error": (0.3, 0.4), "sac": (0.6, 0.4)}
    for command, expected in exponents.items():
        train(f"{command} {positive}", tmp_path / command)
        config = OmegaConf.load(tmp_path / command / "config.yaml")
        assert (config.buffer.alpha, config.buffer.beta) == expected
    train(f"ddpg {positive} gamma=0.8 env.success=terminated buffer.far=0.1 reward_scale=3", tmp_path / "given")
    config = OmegaConf.load(tmp_path / "given" / "config.yaml")
    given = config.gamma, config.env.success, config.buffer.far, list(config.reward_range), config.reward_scale
    assert given == (0.8, "terminated", 0.1, [0.0, 10.0], 3.0)


# The reward is 1 at the goal, so rewards after the end of an episode would count.
rewarded = lambda: gymnasium.wrappers.TransformReward(BitFlipping(n_bits=6), lambda reward: reward + 1)  # noqa: E731
gymnasium.register("RewardedBits-v0", rewarded)


@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])  # starts processes
def test_an_evaluation_is_of_the_episodes_that_a_loop_over_gymnasium_environments_plays(parallel):
    """Each episode is compared with an episode of a single Gymnasium environment with the same seed."""
    sizes = ["evaluation.episodes=7", "evaluation.num_envs=3", f"evaluation.parallel={parallel}"]
    config = configure("dqn", f"env.name={__name__}:RewardedBits-v0", "env.success=is_success", *sizes)

    def act(observation, goal):
        wrong = observation != goal  # flips the first wrong bit, or, with an even number of wrong bits, bit 0
        return torch.where(wrong.sum(-1) % 2 == 0, 0, wrong.int().argmax(-1))

    policy, evaluation = (
        TensorDictModule(act, ["observation", "desired_goal"], ["action"]),
        environments.Evaluation(config),
    )
    found = [evaluation(policy) for _ in range(2)][-1]  # the same episodes every time
    evaluation.close()
    env, seeds, seed = gymnasium.make("RewardedBits-v0"), environments.make_env(config.env), 1_000_000
    for number in range(7):
        env.reset(seed=seed)  # TorchRL's set_seed does this; the episode starts with the next reset
        observation, _ = env.reset()
        total, length, ends = 0, 0, [False]
        while not any(ends):
            action = act(*(torch.as_tensor(observation[key]) for key in policy.in_keys)).numpy()
            observation, reward, *ends, info = env.step(action)
            total, length = total + reward, length + 1
        distance = np.linalg.norm(observation["achieved_goal"].astype(float) - observation["desired_goal"])
        expected = {"success": info["is_success"], "return": total, "distance": distance, "length": length}
        assert {name: float(values[number]) for name, values in found.items()} == pytest.approx(expected, abs=1e-5)
        seed = seeds.set_seed(seed)
    assert len(found["length"].unique()) > 1


@pytest.mark.parametrize("more", ["buffer.prioritized=movement", "env.num_envs=5", "hindsight.when=writing"])
def test_the_command_of_the_page_trains_on_the_environment_of_the_tutorial(more, tmp_path, monkeypatch):
    """It has other keys, float64, a reward that reads info, and ends on success."""
    tutorial = find_examples(DOCS / "tutorials/your-own-environment.md")
    source = [example.source for example in tutorial if "class Cart" in example.source]
    (tmp_path / "cart.py").write_text("".join(source) + python_blocks("how-to/training-scripts")[0])
    monkeypatch.syspath_prepend(tmp_path)
    page = (DOCS / "how-to/training-scripts.md").read_text()
    script, overrides = re.search(r"PYTHONPATH=\. python examples/(dqn)\.py (.*?)\n```", page, re.DOTALL).groups()
    more += " ~env.kwargs.max_episode_steps speedup=none normalization.enabled=true buffer.size=2000"
    run = train(f"{script} {overrides} {more}".replace("\\\n", ""), tmp_path / "run")
    batch = run.components["buffer"].sample(2000)
    relabelled, after = batch["hindsight", "relabelled"].squeeze(-1), batch["next"]
    assert 0.5 < relabelled.float().mean() < 0.95
    reached = ((after["cart"][..., :1] - batch["target"]).abs() <= 0.02).squeeze(-1)
    assert reached[relabelled].any()
    assert torch.equal(after["terminated"].squeeze(-1), reached)
    torch.testing.assert_close(after["reward"].squeeze(-1), reached.float() - 1 - after["fuel"].flatten())


@pytest.mark.parametrize(("more", "moves"), [("", True), ("buffer.moved=still:ignore", False)])
def test_a_setting_says_what_must_move_to_be_sampled_more_often(more, moves, tmp_path, monkeypatch):
    (tmp_path / "still.py").write_text("def ignore(goals):\n    return 0 * goals\n")
    monkeypatch.syspath_prepend(tmp_path)
    command = f"ddpg ++env.kwargs.max_episode_steps=25 buffer.prioritized=movement {more}"
    movement = train(command, tmp_path / "run").components["buffer"].storage[:]["movement"]
    assert bool((movement > 0.05).any()) == moves
