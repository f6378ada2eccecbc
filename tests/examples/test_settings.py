"""Settings that cannot work are refused before anything is written; other environments work."""

import contextlib
import importlib
import re
from dataclasses import is_dataclass
from typing import get_args, get_type_hints

import common
import gymnasium
import numpy as np
import pytest
import torch
from hydra.errors import ConfigCompositionException
from pydantic import NonNegativeInt, PositiveInt
from script_runs import EXAMPLES, configure, small_settings, train
from settings import Decay, NonNegative, Positive, PositiveShare, Seed, Share
from start import CHUNK, MULTIPLES, check_env
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_her.envs import PointReach


class OtherRewards(PointReach):
    """Success is a plain bool under another name, which resets leave out; the reward at the goal is 1."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {}

    def step(self, action):
        *transition, info = super().step(action)
        return *transition, {"at_goal": bool(info["is_success"])}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return super().compute_reward(achieved_goal, desired_goal, info) + 1


class OtherSpaces(PointReach):
    """Has other actions, and goals of another dtype, in tenths."""

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


class Arrived(gymnasium.Wrapper):
    """Adds the success under another name."""

    def step(self, action):
        *transition, info = super().step(action)
        return *transition, info | {"arrived": info["is_success"]}


class Phases(PointReach):
    """Observes a single integer too."""

    def __init__(self):
        super().__init__()
        self.observation_space.spaces["phase"] = gymnasium.spaces.Discrete(3)

    def _observation(self):
        return super()._observation() | {"phase": np.int64(self.np_random.integers(3))}


ACTIONS = {
    "wide": gymnasium.spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32)),
    "square": gymnasium.spaces.Box(-1, 1, (2, 2)),
    "boundless": gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "pairs": gymnasium.spaces.MultiDiscrete([3, 3]),
    "from one": gymnasium.spaces.Discrete(4, start=1),
}
gymnasium.register("OtherRewards-v0", OtherRewards, max_episode_steps=50)
gymnasium.register("OtherSpaces-v0", OtherSpaces, max_episode_steps=50)
gymnasium.register("OtherScale-v0", OtherScale, max_episode_steps=50)
gymnasium.register("Arrived-v0", lambda: Arrived(PointReach()), max_episode_steps=50)
gymnasium.register("Phases-v0", Phases, max_episode_steps=50)
gymnasium.register("Endless-v0", PointReach)


# An environment of one's own, docs/tutorials/your-own-environment.md


class Cart(gymnasium.Env):
    """Other keys, float64, a goal that is a part of the state, a reward that reads info, and ends on success."""

    def __init__(self):
        box = gymnasium.spaces.Box
        self.observation_space = gymnasium.spaces.Dict(cart=box(-2, 2, (2,), np.float64), target=box(-1, 1, (1,)))
        self.action_space = gymnasium.spaces.Discrete(3)  # push left, roll, push right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cart = np.array([self.np_random.uniform(-1, 1), 0.0])  # position and velocity
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        self.steps = 0
        return {"cart": self.cart, "target": self.target}, {"fuel": 0.0}

    def step(self, action):
        push = int(action) - 1
        position, velocity = self.cart
        velocity = 0.9 * velocity + 0.05 * push
        self.cart = np.array([np.clip(position + velocity, -1, 1), velocity])
        self.steps += 1
        info = {"fuel": 0.1 * abs(push), "tanks": np.zeros(2), "driver": "Ada", "contacts": [[0], [1, 2]]}
        reward = self.compute_reward(self.cart[:1], self.target, info)
        return {"cart": self.cart, "target": self.target}, reward, bool(reward > -0.5), self.steps == 30, info

    def compute_reward(self, achieved_goal, desired_goal, info):
        return at_target(achieved_goal, desired_goal) - 1.0 - info["fuel"]


def position(cart):
    return cart[..., :1]


def at_target(achieved, desired):
    return abs(achieved - desired)[..., 0] <= 0.02


def whole_cart(achieved, desired):
    return abs(achieved - desired).expand(-1, 5) <= 0.02  # a wrong shape


def as_array(cart):
    return np.asarray(cart[..., :1])


gymnasium.register("Cart-v0", Cart)
CART = (
    "dqn speedup=none env.name=Cart-v0 env.achieved_goal_key=cart env.desired_goal_key=target"
    f" env.goal_fn={__name__}:position env.terminated_fn={__name__}:at_target env.info_keys=[fuel]"
    " env.success=terminated inputs=[cart,target] normalization.enabled=true ~env.kwargs.max_episode_steps"
)


# Refusals

OUTSIDE = [  # values outside the range of each type
    (PositiveInt, [0]), (NonNegativeInt, [-50]), (Positive, [0, -1, "inf"]), (NonNegative, [-1, "nan"]),
    (Seed, [-1, 2**32]), (Share, [-0.1, 1.1]), (PositiveShare, [0, 1.1]), (Decay, [-0.1, 1]),
]  # fmt: skip


def outside(settings, prefix=""):
    """Yield the name of each setting that is a number or a list of numbers, and values outside its range."""
    hints = get_type_hints(settings, include_extras=True)
    for name, plain in get_type_hints(settings).items():
        if is_dataclass(plain):
            yield from outside(plain, f"{prefix}{name}.")
        elif {int, float} & {plain, *get_args(plain)}:
            hint = hints[name]
            yield (
                prefix + name,
                [value for kind, values in OUTSIDE if kind in (hint, *get_args(hint)) for value in values],
            )


NUMBERS = {
    name: (script, values)
    for script in ("sac", "td3", "dqn", "ddpg")
    for name, values in outside(importlib.import_module(script).Config)
}
REFUSED = [
    *(
        (
            f"{script} {name}={value}",
            rf"^{re.escape(f'{name}={value}')}(\.0)?: Input should be (greater than|less than|a finite) ",
        )
        for name, (script, values) in NUMBERS.items()
        if name != "hidden"
        for value in values
    ),
    ("sac tau=0", r"tau=0\.0: Input should be greater than 0\."),
    ("td3 hidden=[128,0]", r"hidden\.1=0: Input should be greater than 0\."),
    ("td3 gamma=2 seed=-1", r"seed=-1: Input should be .*\ngamma=2\.0: Input should be less than or equal to 1\."),
    *((f"td3 {name}=120", rf"{name}=120 must be a multiple of") for name in MULTIPLES if name != CHUNK),
    ("td3 env.num_envs=3", r"collector\.steps_per_chunk=50 must be a multiple of env\.num_envs=3"),
    ("td3 checkpoint.interval=150", r"checkpoint\.interval=150 must be a multiple of logger\.interval=100"),
    ("ddpg inputs=[]", r"inputs=\[\]: List should have at least 1 item"),
    ("ddpg inputs=[observation]", r"inputs=\['observation'\] must contain the desired goal, 'desired_goal'"),
    ("ddpg inputs=[observation,desired]", r"Observations of torchrl_her/PointReach-v0 have no \['desired'\], only"),
    (
        "ddpg env.achieved_goal_key=observation",
        r"ValueError\(.An achieved goal has the shape \(4,\) .*Pass goal_fn .* are settings: env\.goal_fn",
    ),
    (f"{CART} env.clip_observation=5", r"have no \['observation'\], only \['cart', 'target'\]"),
    (f"{CART} inputs=[cart,target,fuel]", r"have no \['fuel'\], only \['cart', 'target'\]"),  # an entry of info
    ("ddpg env.achieved_goal_key=achieved", r"have no \['achieved'\], only \['achieved_goal', "),
    ("ddpg env.desired_goal_key=desired", r"have no \['desired'\], only \['achieved_goal', "),
    (
        "ddpg env.info_keys=[fuel]",
        r"\['fuel'\] must be .* which has \['is_success', 'terminated'\]: return info.* or set env\.info_keys",
    ),
    (
        "ddpg env.goal_fn=no_such_module:goal",
        r"No module named 'no_such_module'.*env\.goal_fn=module:function.*PYTHONPATH",
    ),
    ("ddpg env.goal_fn=numpy", r"TypeError\(.goal_fn must be a function .*, got <module .*numpy"),
    ("ddpg env.terminated_fn=numpy:no_such", r"module 'numpy' has no attribute 'no_such'.* module on PYTHONPATH"),
    ("ddpg collector.random_steps=200", "collector.random_steps=200 must be less than total_steps=200"),
    ("ddpg exploration.final=0.5 exploration.anneal_steps=50", "anneal_steps=50 must be more than .*random_steps=50"),
    (
        "ddpg buffer.n_steps=3 env.info_keys=[is_success]",
        r"With MultiStepTransform, .* of the goals, but EnvReward also reads .*is_success.* is buffer\.n_steps",
    ),
    (
        "ddpg buffer.n_steps=5 env.num_envs=10",
        r"steps_per_chunk=50 must be at least \(buffer\.n_steps \+ 2\) \* env\.num_envs = 70",
    ),
    ("ddpg buffer.prioritized=movement", r"collector\.steps_per_chunk=50 must be a multiple of whole episodes, 15"),
    ("sac loss=tqc dropped_quantiles=25", "dropped_quantiles=25 must be less than quantiles=25"),
    ("sac loss=tqc loss_function=l2", "loss=tqc has its own loss: leave loss_function at smooth_l1, not l2"),
    ("ddpg device=gpu", r"device=gpu: String should match pattern .*cpu\|cuda"),
    ("ddpg +total_step=7", "total_step: Key 'total_step' not in 'Config'"),
    ("ddpg +buffer.k=2 buffer.size=200", r"buffer\.k: Key 'k' not in 'Buffer'"),
    ("dqn inputs=[] hindsight.enabled=false", r"inputs=\[\]: List should have at least 1 item"),
    ("ddpg buffer.size=40 batch_size=20", r"buffer\.size=40 must be at least 50, the size of a chunk or of a batch"),
    ("ddpg batch_size=151", r"buffer\.size=150 must be at least 151, the size of a chunk or of a batch"),
    (
        f"{CART} env.info_keys=[]",
        r"compute_reward of Cart reads info\[.*fuel.*\], .*in info_keys=.* are settings: env\.goal_fn",
    ),
    (
        f"{CART} env.info_keys=[fuel,tanks]",
        r"\['tanks'\] must be numbers or bools in every info of Cart-v0",
    ),
    (
        f"{CART} env.info_keys=[fuel,driver]",
        r"\['driver'\] must be numbers or bools in every info of Cart-v0",
    ),
    (
        f"{CART} env.terminated_fn={__name__}:whole_cart",
        r"function for .*'terminated'.* returned the shape .* It must return one value per row",
    ),
    (
        f"{CART} env.goal_fn={__name__}:as_array",
        r"goal_fn must return a tensor with one goal per row, but it returned ndarray",
    ),
    (
        "sac env.name=Endless-v0 ~env.kwargs.max_episode_steps",
        r"Episodes do not end in 10,000 steps: set \+env\.kwargs\.max_episode_steps=",
    ),
    ("ddpg speedup=cudagraph", "speedup=cudagraph needs device=cuda, not cpu"),
    ("ddpg gamma=1", r"clip_target=true needs gamma < 1 .*gamma=1.0\): use clip_target=false"),
    (
        "ddpg buffer.prioritized=movement hindsight.when=writing ++env.kwargs.max_episode_steps=25",
        r"MovementPriority needs .* It does not work with HindsightAugmentation.* is hindsight\.when=writing",
    ),
    (
        "ddpg hindsight.when=writing env.num_envs=10",
        r"no episode ends in the first .* Increase collector\.random_steps",
    ),
    (
        "dqn hindsight.when=writing env.num_envs=25",
        r"no episode ends in the first .* Increase collector\.random_steps",
    ),
    (
        "ddpg env.desired_goal_key=achieved_goal inputs=[achieved_goal]",
        "achieved_goal_key and desired_goal_key must differ, got 'achieved_goal' for both",
    ),
    (f"{CART} env.info_keys=[] batch_size=1 hindsight.her_ratio=0.05", r"compute_reward of Cart reads info"),
    ("ddpg buffer.n_steps=24 env.num_envs=2", r"steps_per_chunk=50 must be at least .* = 52"),
    (
        "ddpg hindsight.when=writing ++env.kwargs.max_episode_steps=30 env.num_envs=5 collector.random_steps=150",
        r"no episode ends in the first 20 steps of an environment\. Increase",
    ),
    (
        "ddpg buffer.n_steps=3 hindsight.when=writing",
        r"MultiStepTransform sums .* but HindsightAugmentation .* is hindsight\.when=writing, .* is buffer\.",
    ),
    *(
        (f"ddpg hindsight.when=writing hindsight.her_ratio={share}", r"her_ratio must be k / \(k \+ 1\)")
        for share in (0.0, 0.3, 0.7, 1.0)
    ),
    ("ddpg env.name=CartPole-v1", r"Observations of CartPole-v1 have no \['achieved_goal', 'desired_goal'\]"),
    ("ddpg env.name=torchrl_her/PointReach-v7", r"'torchrl_her/PointReach-v7' cannot be made: .*"),
    ("ddpg env.name=no_such_module:Env-v0", r"'no_such_module:Env-v0' cannot be made: No module named"),
    ("sac env.name=torchrl_her/BitFlipping-v0", r"are Discrete\(15\)\. .*the others a bounded, flat Box"),
    ("dqn env.name=torchrl_her/PointReach-v0", r"are Box\(.*\. dqn\.py needs Discrete\(n\), the others"),
    ("dqn env.name=OtherSpaces-v0 +env.kwargs.actions=pairs", r"MultiDiscrete.*\. dqn\.py needs Discrete\(n\)"),
    ("dqn env.name=OtherSpaces-v0 '+env.kwargs.actions=from one'", r"Discrete\(4, start=1\)\. dqn\.py needs"),
    ("ddpg env.name=OtherSpaces-v0 +env.kwargs.actions=boundless", "the others a bounded, flat Box"),
    ("ddpg env.name=OtherSpaces-v0 +env.kwargs.actions=square", "the others a bounded, flat Box"),
    ("td3 env.name=OtherSpaces-v0 +env.kwargs.actions=boundless", "the others a bounded, flat Box"),
    (
        "ddpg env.name=OtherScale-v0 +env.kwargs.shift=1.0",
        r"OtherScale-v0 gives 0 to 1 \(gamma=0.95\): use",
    ),
    ("ddpg env.name=OtherScale-v0 +env.kwargs.scale=10.0", "OtherScale-v0 gives -10 to 0 .*: use clip_target=false"),
    ("ddpg env.name=OtherRewards-v0 env.success=at_goal", "OtherRewards-v0 gives 0 to 1 .*: use clip_target=false"),
    (
        "ddpg env.name=OtherRewards-v0 clip_target=false",
        r"\['is_success'\] must be .* has \['at_goal', .*: return info\[.is_success.\] in step, or set .*env\.success",
    ),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"cannot be trained on: .*(NVIDIA|CUDA)"):
        train("ddpg device=cuda:1", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_impossible_settings_are_refused_and_nothing_is_written(command, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        train(command, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_trial_of_an_environment_depends_only_on_the_seed_of_the_run():
    after = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        check_env(small_settings("ddpg"))
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_a_wrong_argument_of_an_environment_shows_the_error_of_the_environment(tmp_path):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'n_bits' .*PointReach-v0 with kwargs"):
        train("ddpg +env.kwargs.n_bits=5", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_reward_of_an_environment_shows_its_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(OtherScale, "compute_reward", lambda self, achieved, desired, info: self.no_such_attribute)
    with pytest.raises(SystemExit, match=r"OtherScale-v0 cannot be trained on: AttributeError"):
        train("ddpg env.name=OtherScale-v0", tmp_path)
    assert "test_settings.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("ddpg batch_size=null", "field 'batch_size' is not Optional"),
        ("ddpg env.num_envs=two", "Value 'two' of type 'str' could not be converted to Integer"),
        ("ddpg inputs=observation", "str is not a ListConfig, list or tuple"),
        ("ddpg logger.kinds=null", "field 'logger.kinds' is not Optional"),
        ("ddpg logger.kinds=[table]", r"expected one of \[csv, tensorboard, wandb\]"),
        ("sac loss=tcq", r"expected one of \[sac, tqc\]"),
        ("ddpg buffer.prioritized=true", r"expected one of \[error, movement\]"),
        ("ddpg hindsight.when=write", r"expected one of \[sampling, writing\]"),
        ("ddpg hindsight.strategy=futur", r"expected one of \[future, final, episode, random\]"),
        ("ddpg speedup=capture", r"expected one of \[none, record, compile, cudagraph\]"),
        ("ddpg compile=true", "Key 'compile' not in 'Config'"),
        ("ddpg actor_interval=2", "Key 'actor_interval' not in 'Config'"),  # of td3.py
    ],
)
def test_wrong_types_and_names_are_refused_by_hydra(command, cause, tmp_path):
    with pytest.raises(ConfigCompositionException) as refused:
        train(command, tmp_path)
    assert re.search(cause, str(refused.value.__cause__))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["ddpg", "td3", "sac", "dqn"])
def test_every_number_has_a_range(script):
    values = dict(outside(importlib.import_module(script).Config))
    assert len(values) >= 30
    assert all(values.values())


def test_a_missing_environment_says_what_to_install():
    env = configure("sac", "+task=fetch").env
    try:
        gymnasium.spec("FetchReach-v4")
    except gymnasium.error.Error:
        with pytest.raises(SystemExit, match="gymnasium-robotics mujoco"):
            common.make_env(env)
    else:
        assert common.make_env(env).action_spec.shape == (4,)


TASKS = {
    "bit_flipping_50": ["dqn"], "fetch": ["ddpg", "td3", "sac"], "fetch_ddpg": ["ddpg"], "fetch_push": ["ddpg"],
    "fetch_reach": ["td3", "sac"], "point_maze": ["sac", "td3"],
}  # fmt: skip


def test_all_tasks_are_tested():
    assert sorted(TASKS) == sorted(path.stem for path in (EXAMPLES / "config" / "task").glob("*.yaml"))


@pytest.mark.parametrize(("task", "script"), [(task, script) for task, scripts in TASKS.items() for script in scripts])
def test_a_task_is_a_whole_configuration(task, script):
    config = configure(script, f"+task={task}")
    assert config.total_steps % config.evaluation.interval == 0


# Other environments


def test_environments_of_other_packages_are_named_with_their_module():
    for name, capacity in (
        ("env.name=torchrl_her.envs:torchrl_her/PointReach-v0", 1000 + 100),  # episodes of 50 steps
        ("env.name=OtherRewards-v0 +env.kwargs.max_episode_steps=64", 3000 + 100),
        ("env.name=Endless-v0", 3000 + 100),  # of unknown length
    ):
        config = configure("ddpg", *name.split(), "buffer.size=1000")
        assert common.make_hindsight(config, common.make_env(config.env)).capacity == capacity


@pytest.mark.parametrize("script", ["ddpg", "td3", "sac"])
def test_actions_may_have_bounds_of_their_own(script, tmp_path):
    command = f"{script} env.name=OtherSpaces-v0 +env.kwargs.actions=wide"
    refused = "speedup=record: not recorded" if script == "sac" else None
    with pytest.warns(UserWarning, match=refused) if refused else contextlib.nullcontext():
        run = train(command, tmp_path)
    assert run.components["progress"]["updates"] == 150
    actions = run.components["buffer"].storage[:]["action"]
    assert (actions >= torch.tensor([-2.0, 0.0])).all()
    assert (actions <= torch.tensor([2.0, 1.0])).all()
    assert (actions[:, 0] > 1).any(), "none is outside the usual bounds"


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint8"])
def test_goals_may_be_of_any_dtype(dtype, tmp_path):
    run = train(f"ddpg speedup=none env.name=OtherSpaces-v0 +env.kwargs.dtype={dtype}", tmp_path)
    history = run.components["log"]
    assert history["evaluation/distance"][-1][1] > 0
    assert history["evaluation/success"][-1][0] == 200


def test_an_observation_may_be_a_single_integer(tmp_path):
    run = train("ddpg env.name=Phases-v0 inputs=[phase,observation,desired_goal]", tmp_path)
    steps, total, _ = run.components["policy"][0].sums[:, 0].tolist()
    assert steps == 400  # each step twice
    assert 0.8 < total / steps < 1.2  # phases 0, 1 and 2


def test_an_evaluation_that_does_not_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "LONGEST_EPISODE", 10)  # episodes have 15
    with pytest.raises(SystemExit, match=r"do not end in 10 steps: set \+env\.kwargs\.max_episode_steps="):
        train("ddpg env.name=Endless-v0", tmp_path / "long")
    monkeypatch.undo()
    train("ddpg speedup=none env.name=Endless-v0", tmp_path / "other")


def test_desired_goals_are_normalized_with_mapped_achieved_goals():
    """A relabelled transition has an achieved goal as its desired goal, so both count."""
    config = small_settings(CART)
    env = common.make_env(config.env)
    inputs, steps = common.Inputs(config, env), env.rollout(20)["next"]
    inputs.update(TensorDict(next=steps, batch_size=steps.batch_size))
    expected = torch.cat([steps["target"], position(steps["cart"])]).double()
    torch.testing.assert_close(inputs.mean[-1].double(), expected.mean(), rtol=1e-5, atol=1e-6)
    deviation = expected.std(correction=0).clamp_min(0.01)
    torch.testing.assert_close(inputs.scale[-1].double(), deviation, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rewards", "reward_at_goal"),
    [
        ("env.name=OtherScale-v0 +env.kwargs.shift=1.0", 1.0),
        ("env.name=OtherScale-v0 +env.kwargs.scale=10.0", 0.0),
        ("env.name=OtherRewards-v0 env.success=at_goal", 1.0),
        ("env.name=Arrived-v0 env.success=arrived", 0.0),
    ],
)
def test_other_rewards_and_names_of_success_work_without_clipped_targets(rewards, reward_at_goal, tmp_path):
    run = train(f"ddpg speedup=none {rewards} clip_target=false", tmp_path)
    assert 0 <= run.components["log"]["evaluation/success"][-1][1] <= 1
    batch = run.components["buffer"].sample(1000)
    reached = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True) <= 0.05
    assert torch.equal(batch["next", "reward"] == reward_at_goal, reached)


@pytest.mark.parametrize("more", ["buffer.prioritized=movement", "env.num_envs=5", "hindsight.when=writing"])
def test_an_environment_with_other_keys_needs_no_line_of_code(more, tmp_path):
    run = train(f"{CART} {more} total_steps=400 buffer.size=2000", tmp_path)
    history = run.components["log"]
    assert history["evaluation/success"][-1][0] == history["train/loss"][-1][0] == 400
    assert 0 < history["evaluation/distance"][-1][1] < 2
    batch = run.components["buffer"].sample(2000)
    relabelled, after = batch["hindsight", "relabelled"].squeeze(-1), batch["next"]
    assert 0.5 < relabelled.float().mean() < 0.95
    reached = at_target(position(after["cart"]), batch["target"])
    assert reached[relabelled].any()
    assert torch.equal(after["terminated"].squeeze(-1), reached)
    torch.testing.assert_close(after["reward"].squeeze(-1), reached.float() - 1 - after["fuel"].flatten())


def test_success_can_be_the_end_of_the_episode():
    evaluation = common.Evaluation(small_settings(f"{CART} evaluation.episodes=30 evaluation.num_envs=3"))
    towards = TensorDictModule(
        lambda cart, target: (target - cart[..., :1] - 4 * cart[..., 1:]).sign().long().squeeze(-1) + 1,
        ["cart", "target"],
        ["action"],
    )
    outcomes = evaluation(towards)
    evaluation.close()
    assert 0 < outcomes["success"].float().mean() < 1
    assert torch.equal(outcomes["success"].bool(), outcomes["distance"] <= 0.02)
    assert (outcomes["length"][~outcomes["success"].bool()] == 30).all()
