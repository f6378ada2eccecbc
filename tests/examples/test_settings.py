"""Settings that cannot be are refused before anything is written; those of other environments work."""

import common
import gymnasium
import numpy as np
import pytest
import torch
from script_runs import EXAMPLES, configure, train
from settings import AT_LEAST_ONE, check_settings

from torchrl_her.envs import PointReach


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


REFUSED = [
    *((f"td3 {name}=0", rf"{name}=0 has to be 1 or more") for name in AT_LEAST_ONE),
    ("ddpg batch_size=null", "batch_size=None has to be 1 or more"),
    ("ddpg env.num_envs=two", "env.num_envs=two has to be 1 or more"),
    ("ddpg inputs=[]", r"inputs are some of observation, achieved_goal, desired_goal, not \[\]"),
    ("ddpg inputs=[observation,desired]", r"inputs are some of .* not \['observation', 'desired'\]"),
    ("ddpg inputs=observation", r"inputs is a list: inputs=\[observation,desired_goal\], say"),
    ("ddpg logger.kinds=null", r"logger\.kinds is a list: \[csv\], say, or \[\]"),
    ("ddpg logger.kinds=csv", r"logger\.kinds is a list: \[csv\], say, or \[\]"),
    ("ddpg logger.kinds=[table]", "logger.kinds are csv, tensorboard and wandb, not table"),
    ("ddpg evaluation.interval=120", "evaluation.interval=120 has to be a multiple of collector.steps_per_chunk=50"),
    ("ddpg collector.random_steps=120", "collector.random_steps=120 has to be a multiple"),
    ("ddpg gamma=1", "no lowest value to clip to: use clip_target=false"),
    ("sac loss=tcq", "loss is 'sac' or 'tqc', not 'tcq'"),
    ("ddpg buffer.prioritized=true", "is null, 'error' or 'movement', not True"),
    ("ddpg buffer.prioritized=movement buffer.n_steps=3", "needs a row of the buffer for each step"),
    ("ddpg buffer.prioritized=movement hindsight.when=writing", "needs a row of the buffer for each step"),
    ("ddpg buffer.n_steps=3 hindsight.when=writing", "Returns of several steps need hindsight.when=sampling"),
    ("ddpg hindsight.when=write", r"hindsight\.when is 'sampling' or 'writing', not 'write'"),
    *(
        (f"ddpg hindsight.when=writing hindsight.her_ratio={share}", rf"her_ratio = k / \(k \+ 1\), not {share}")
        for share in (0.0, 0.3, 0.7, 1.0)
    ),
    ("ddpg env.name=CartPole-v1", r"not a goal environment.*\['achieved_goal', 'desired_goal'"),
    ("ddpg env.name=torchrl_her/PointReach-v7", r"'torchrl_her/PointReach-v7' cannot be made: .*"),
    ("ddpg env.name=no_such_module:Env-v0", r"'no_such_module:Env-v0' cannot be made: No module named"),
    ("sac env.name=torchrl_her/BitFlipping-v0", r"Actions of .* are numbers: train it with dqn\.py"),
    ("dqn env.name=torchrl_her/PointReach-v0", r"Actions of .* are vectors: train it with ddpg\.py"),
    ("dqn env.name=OtherSpaces-v0 +env.kwargs.actions=pairs", r"are MultiDiscrete.*one of the numbers from 0 on"),
    ("dqn env.name=OtherSpaces-v0 '+env.kwargs.actions=from one on'", r"Discrete\(4, start=1\).*numbers from 0 on"),
    ("ddpg env.name=OtherSpaces-v0 +env.kwargs.actions=boundless", "Actions of OtherSpaces-v0 have no bounds"),
    ("td3 env.name=OtherSpaces-v0 +env.kwargs.actions=boundless", "Actions of OtherSpaces-v0 have no bounds"),
    ("ddpg env.name=OtherScale-v0 +env.kwargs.shift=1.0", "OtherScale-v0 gives 1 at the goal and 0 elsewhere: use"),
    ("ddpg env.name=OtherScale-v0 +env.kwargs.scale=10.0", "gives 0 at the goal and -10 elsewhere: use clip_target"),
    ("ddpg env.name=OtherRewards-v0 env.success=at_goal", "gives 1 at the goal and 0 elsewhere: use clip_target=false"),
    ("ddpg env.name=OtherRewards-v0 clip_target=false", r"no .* 'is_success', but \['at_goal'\].*env\.success="),
]


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_impossible_settings_are_named_and_nothing_is_written(command, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train(command, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_environment_says_what_to_install():
    try:
        gymnasium.spec("FetchReach-v4")
    except gymnasium.error.Error:
        with pytest.raises(SystemExit, match="gymnasium-robotics mujoco"):
            common.make_env(configure("sac", "+task=fetch").env)
    else:
        assert common.make_env(configure("sac", "+task=fetch").env).action_spec.shape == (4,)


TASKS = {
    "bit_flipping_50": ["dqn"], "fetch": ["ddpg", "td3", "sac"], "fetch_ddpg": ["ddpg"], "fetch_push": ["ddpg"],
    "fetch_reach": ["td3", "sac"],
}  # fmt: skip


def test_all_tasks_are_tested():
    assert sorted(TASKS) == sorted(path.stem for path in (EXAMPLES / "config" / "task").glob("*.yaml"))


@pytest.mark.parametrize(("task", "script"), [(task, script) for task, scripts in TASKS.items() for script in scripts])
def test_a_task_is_a_whole_configuration(task, script):
    config = configure(script, f"+task={task}")
    check_settings(config)
    assert config.total_steps % config.evaluation.interval == 0


# Other environments


def test_environments_of_other_packages_are_named_with_their_module():
    config = configure("ddpg", "env.name=torchrl_her.envs:torchrl_her/PointReach-v0", "buffer.size=1000")
    assert common.make_hindsight(config).capacity == 1000 + 100  # episodes of 50 steps
    config = configure("ddpg", "env.name=OtherRewards-v0", "+env.kwargs.max_episode_steps=64", "buffer.size=1000")
    assert common.make_hindsight(config).capacity == 3000 + 100


@pytest.mark.parametrize("script", ["ddpg", "td3", "sac"])
def test_actions_may_have_bounds_of_their_own(script, tmp_path):
    training = train(f"{script} env.name=OtherSpaces-v0 +env.kwargs.actions=wide", tmp_path)
    actions = training.replay_buffer.storage[:]["action"]
    assert (actions >= torch.tensor([-2.0, 0.0])).all()
    assert (actions <= torch.tensor([2.0, 1.0])).all()
    assert (actions[:, 0] > 1).any(), "one that is between no other bounds"


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8"])
def test_goals_may_be_of_any_dtype(dtype, tmp_path):
    training = train(f"ddpg env.name=OtherSpaces-v0 +env.kwargs.dtype={dtype}", tmp_path)
    assert training.history["evaluation/distance"][-1][1] > 0
    assert training.history["evaluation/success"][-1][0] == 200


def test_an_evaluation_that_does_not_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "LONGEST_EPISODE", 60)
    with pytest.raises(SystemExit, match=r"did not end in 60 steps: .*\+env\.kwargs\.max_episode_steps="):
        train("ddpg env.name=Endless-v0 ~env.kwargs.max_episode_steps", tmp_path)
    train("ddpg env.name=Endless-v0", tmp_path / "other")


@pytest.mark.parametrize(
    "rewards",
    [
        "env.name=OtherScale-v0 +env.kwargs.shift=1.0",
        "env.name=OtherScale-v0 +env.kwargs.scale=10.0",
        "env.name=OtherRewards-v0 env.success=at_goal",
    ],
)
def test_other_rewards_and_names_of_success_work_without_clipped_targets(rewards, tmp_path):
    training = train(f"ddpg {rewards} clip_target=false", tmp_path)
    assert 0 <= training.history["evaluation/success"][-1][1] <= 1
    batch = training.replay_buffer.sample(1000)
    reached = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True) <= 0.05
    assert torch.equal(batch["next", "reward"] == training.reward_at_goal, reached)
