"""Data collection, writing, sampling, updates and evaluation of the training scripts."""

import importlib

import common
import gymnasium
import numpy as np
import pytest
import torch
from script_runs import configure, drawn, small_settings, train
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_her.envs import BitFlipping


@pytest.mark.parametrize(("updates_per_step", "updates"), [(0.25, 150 // 4), (0.82, 123)])
def test_updates_are_exact(updates_per_step, updates, tmp_path):
    """0.82 * 150 is a little less than 123 in floating point."""
    run = train(f"ddpg speedup=none updates_per_step={updates_per_step}", tmp_path)
    assert run.components["progress"]["updates"] == updates
    optimizer = run.components["critic_optimizer"]
    assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {updates}


@pytest.mark.parametrize("speedup", ["none", "record"])
def test_td3_updates_its_actor_with_every_third_update_of_its_critics_if_the_interval_is_3(speedup, tmp_path):
    run = train(f"td3 speedup={speedup} updates_per_step=0.5 actor_interval=3", tmp_path)
    steps = {
        name: {int(state["step"]) for state in run.components[f"{name}_optimizer"].state_dict()["state"].values()}
        for name in ("actor", "critic")
    }
    assert steps == {"critic": {75}, "actor": {25}}


@pytest.mark.parametrize("command", ["dqn", "ddpg", "ddpg action_penalty=1", "td3", "sac"])
def test_the_loss_function_can_be_chosen(command, tmp_path):
    run = train(f"{command} speedup=none loss_function=l1", tmp_path)
    assert run.components["loss"].loss_function == "l1"


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="PyTorch has one thread on this machine")
def test_updates_keep_the_number_of_threads_when_the_environments_are_closed(tmp_path, monkeypatch):
    threads = []

    def count_threads(function):
        return lambda batch: threads.append(torch.get_num_threads()) or function(batch)

    monkeypatch.setattr("common.Recorded", count_threads)
    train("ddpg env.num_envs=5", tmp_path)
    assert len(threads) > 150
    assert set(threads) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(("her_ratio", "lowest", "highest"), [(0.8, 0.95, 1.0), (0.0, 0.0, 0.1)])
def test_dqn_flips_15_bits_with_hindsight_and_not_without(her_ratio, lowest, highest, tmp_path):
    """Plain DQN cannot do it. These are the script's own settings."""
    config = configure("dqn", f"hindsight.her_ratio={her_ratio}", "evaluation.interval=5000", "evaluation.episodes=200")
    run = importlib.import_module("dqn").train(config, tmp_path)
    assert lowest <= run.components["log"]["evaluation/success"][-1][1] <= highest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("speedup", ["none", "record", "cudagraph"])
@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac"])
def test_a_script_trains_on_the_device(script, speedup, tmp_path):
    run = train(f"{script} device=cuda speedup={speedup} normalization.enabled={script != 'dqn'}", tmp_path)
    assert run.components["log"]["evaluation/success"][-1][0] == 200
    assert run.components["buffer"].sample(32).device.type == "cuda"


def make_rewarded_bits():
    """The reward is 1 at the goal, so rewards after the end of an episode would count."""
    return gymnasium.wrappers.TransformReward(BitFlipping(n_bits=6), lambda reward: reward + 1)


gymnasium.register("RewardedBits-v0", make_rewarded_bits)


@pytest.mark.parametrize("parallel", [False, pytest.param(True, marks=pytest.mark.slow)])  # starts processes
@pytest.mark.parametrize("script", ["dqn", "ddpg"])
def test_an_evaluation_is_of_the_episodes_that_a_loop_over_gymnasium_environments_plays(script, parallel):
    """Each episode is compared with an episode of a single Gymnasium environment with the same seed."""
    kwargs = [f"env.name={__name__}:RewardedBits-v0"] if script == "dqn" else ["+env.kwargs.max_episode_steps=15"]
    parallel = f"evaluation.parallel={parallel}"
    config = configure(script, *kwargs, "evaluation.episodes=7", "evaluation.num_envs=3", parallel)

    def act(observation, goal):
        if script == "ddpg":
            return (4 * (goal - observation[..., :2])).clamp(-1, 1)
        wrong = observation != goal  # flips the first wrong bit, or, with an even number of wrong bits, bit 0
        return torch.where(wrong.sum(-1) % 2 == 0, 0, wrong.int().argmax(-1))

    policy = TensorDictModule(act, ["observation", "desired_goal"], ["action"])
    evaluation = common.Evaluation(config)
    found = evaluation(policy)
    again = evaluation(policy)
    evaluation.close()
    assert all(torch.equal(values, again[name]) for name, values in found.items())

    env, seed, expected = gymnasium.make(config.env.name, **config.env.kwargs), common.EVALUATION_SEED, []
    seeds = common.make_env(config.env)
    for _ in range(7):
        following = seeds.set_seed(seed)
        env.reset(seed=seed)  # TorchRL's set_seed does this; the episode starts with the next reset
        observation, _ = env.reset()
        rewards, done = [], False
        while not done:
            action = act(*(torch.as_tensor(observation[key]) for key in ("observation", "desired_goal"))).numpy()
            observation, reward, terminated, truncated, info = env.step(action)
            rewards.append(reward)
            done = terminated or truncated
        distance = np.linalg.norm(observation["achieved_goal"].astype(float) - observation["desired_goal"])
        expected.append((float(info["is_success"]), sum(rewards), distance, len(rewards)))
        seed = following
    for name, values in zip(("success", "return", "distance", "length"), zip(*expected, strict=True), strict=True):
        assert found[name].tolist() == pytest.approx(list(values), abs=1e-5), name
    if script == "dqn":
        assert len(set(found["length"].tolist())) > 1, "episodes of different lengths"


def test_targets_of_ddpg_are_clipped():
    ddpg = importlib.import_module("ddpg")
    config, free_config = configure("ddpg", "gamma=0.9"), configure("ddpg", "gamma=0.9", "clip_target=false")
    env = common.make_env(config.env)
    inputs = common.Inputs(config, env)
    policy = ddpg.make_policy(config, env, inputs)
    critic = ddpg.ValueOperator(ddpg.MLP(inputs.width + 2, 1, num_cells=[16]), in_keys=["inputs", "action"])
    batch = inputs(env.rollout(50))
    for bias in (100.0, -100.0):
        torch.nn.init.constant_(list(critic.parameters())[-1], bias)  # of the value itself
        clipped = ddpg.make_loss(config, policy[1:], critic)(batch.clone())["target_value"]
        free = ddpg.make_loss(free_config, policy[1:], critic)(batch.clone())["target_value"]
        assert clipped.max() <= 0
        assert clipped.min() >= -10.0001
        assert free.abs().max() > 80
        torch.testing.assert_close(clipped, free.clamp(-10, 0))


def test_the_action_penalty_adds_the_gradient_of_the_mean_square_of_the_actions():
    ddpg = importlib.import_module("ddpg")
    config, plain_config = configure("ddpg", "action_penalty=0.7"), configure("ddpg")
    env = common.make_env(config.env)
    inputs = common.Inputs(config, env)
    actor = ddpg.make_policy(config, env, inputs)[1:]
    critic = ddpg.ValueOperator(ddpg.MLP(inputs.width + 2, 1, num_cells=[16]), in_keys=["inputs", "action"])
    batch = inputs(env.rollout(50))

    losses = ddpg.make_loss(config, actor, critic)(batch.clone())
    found = torch.autograd.grad(losses["loss_actor"] + losses["loss_value"], [*actor.parameters()])
    plain = ddpg.make_loss(plain_config, actor, critic)(batch.clone())
    action = actor(batch.select("inputs"))["action"]
    total = plain["loss_actor"] + 0.7 * (action**2).mean()
    torch.testing.assert_close(losses["loss_actor"], total)
    torch.testing.assert_close(losses["loss_value"], plain["loss_value"])
    for one, other in zip(found, torch.autograd.grad(total, [*actor.parameters()]), strict=True):
        torch.testing.assert_close(one, other)
    critic_gradients = torch.autograd.grad(losses["loss_actor"], [*critic.parameters()], allow_unused=True)
    assert all(gradient is None for gradient in critic_gradients)


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_average_of_the_policy_is_evaluated_and_saved(decay, tmp_path, monkeypatch):
    ddpg, actors, weights, evaluated = importlib.import_module("ddpg"), [], [], []
    make_loss, evaluate = ddpg.make_loss, ddpg.Evaluation.__call__

    def keep_actor(config, actor, critic):
        actors.append([parameter.detach() for parameter in actor.parameters()])
        weights.append([parameter.clone() for parameter in actors[0]])
        return make_loss(config, actor, critic)

    def keep_weights(update, speedup):
        def updated(batch):
            losses = update(batch)
            weights.append([parameter.clone() for parameter in actors[0]])
            return losses

        return updated

    def keep_evaluated(self, policy):
        evaluated.append([parameter.detach().clone() for parameter in policy.parameters()])
        return evaluate(self, policy)

    monkeypatch.setattr(ddpg, "make_loss", keep_actor)
    monkeypatch.setattr(ddpg, "speed_up", keep_weights)
    monkeypatch.setattr(ddpg.Evaluation, "__call__", keep_evaluated)
    run = train(f"ddpg average={decay}", tmp_path)
    averages = weights[:1]
    for new in weights[1:]:
        averages.append([decay * old + (1 - decay) * value for old, value in zip(averages[-1], new, strict=True)])
    assert len(averages) == 151
    assert (weights[150][0] - weights[140][0]).abs().max() > 1e-3  # so that a wrong average shows
    policy = run.components["policy"]
    for found, update in zip([*evaluated, list(policy.parameters())], (0, 50, 150, 150), strict=True):
        torch.testing.assert_close(found, averages[update], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("when", "copies"), [("writing", 4), ("sampling", 0)])
def test_hindsight_that_is_disabled_relabels_and_writes_nothing_more(when, copies, tmp_path):
    command = f"ddpg speedup=none buffer.size=2000 hindsight.when={when}"
    run = train(f"{command} hindsight.enabled=false", tmp_path / "without")
    assert len(run.components["buffer"]) == 200
    assert not drawn(run, 200)["hindsight", "relabelled"].any()
    run = train(command, tmp_path / "with")
    written = len(run.components["buffer"])
    assert 200 * copies < written <= 200 * (copies + 1)
    assert 0.7 < drawn(run, 2000)["hindsight", "relabelled"].float().mean() < 0.9


def test_what_moves_is_sampled_more_often(tmp_path):
    command = "ddpg speedup=none buffer.prioritized=movement buffer.alpha=1 buffer.beta=0 buffer.far=1"
    command += " ++env.kwargs.max_episode_steps=5"  # a chunk has whole episodes
    buffer = train(command, tmp_path).components["buffer"]
    stored = buffer.storage[:]["movement"].flatten()
    assert stored.max() > 2 * stored.min()
    sampled = stored[buffer.sample(32_000)["index"].flatten()]
    plain, prioritized = stored.mean(), stored.square().mean() / stored.mean()
    assert abs(sampled.mean() - prioritized) < 0.2 * (prioritized - plain)


@pytest.mark.parametrize("names", ["observation,achieved_goal,desired_goal", "desired_goal,observation"])
def test_inputs_are_normalized_alike_when_acting_and_at_both_ends_of_sampled_transitions(names):
    config = configure("ddpg", "buffer.size=300", f"inputs=[{names}]", "normalization.clip=1.5")
    env = common.make_env(config.env)
    inputs = common.Inputs(config, env)
    buffer = common.make_replay_buffer(config, common.make_hindsight(config, env), inputs)
    collected = []
    for seed in range(4):
        env.set_seed(seed)
        data = env.rollout(50)
        buffer.extend(data)
        inputs.update(data)
        collected.append(data["next"])
    # The goals of half of the rows are the achieved goals: relabelled transitions have such goals.
    rows = torch.cat([*collected, *(data.copy().set("desired_goal", data["achieved_goal"]) for data in collected)])
    expected = {key: (rows[key].mean(0), rows[key].std(0, correction=0)) for key in names.split(",")}
    batch = buffer.sample(500)
    assert 0 < batch["hindsight", "relabelled"].float().mean() < 1
    clipped = []
    for state in (batch, batch["next"]):
        columns = [(state[key] - expected[key][0]) / expected[key][1] for key in names.split(",")]
        normalized = torch.cat(columns, -1)
        torch.testing.assert_close(state["inputs"], normalized.clamp(-1.5, 1.5), rtol=1e-4, atol=1e-5)
        acting = inputs(state.select(*names.split(",")))
        assert torch.equal(acting["inputs"], state["inputs"])
        clipped.append((normalized.abs() > 1.5).any())
    assert all(clipped)
    reached = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1) <= 0.05
    assert torch.equal(batch["next", "reward"].squeeze(-1) == 0, reached)  # goals stay raw


def test_an_input_that_does_not_vary_is_not_magnified():
    config = configure("ddpg", "inputs=[observation]")
    env = common.make_env(config.env)
    inputs = common.Inputs(config, env)
    data = env.rollout(10)
    data["next", "observation"] = torch.ones_like(data["observation"])
    inputs.update(data)
    assert (inputs.mean == 1).all()
    assert (inputs.scale == torch.tensor(0.01)).all()


def test_without_normalization_inputs_are_the_observations():
    config = small_settings("dqn normalization.enabled=false")
    env = common.make_env(config.env)
    inputs = common.Inputs(config, env)
    data = env.rollout(5)
    inputs.update(data)
    found = inputs(TensorDict(observation=data["observation"], desired_goal=data["desired_goal"], batch_size=len(data)))
    assert torch.equal(found["inputs"], torch.cat([data["observation"], data["desired_goal"]], -1).float())


@pytest.mark.parametrize("resumes", [False, True])
def test_exploration_falls_linearly_to_its_final_share(resumes, tmp_path, monkeypatch):
    run, found = importlib.import_module("run"), []
    command = "ddpg exploration.noise=0.4 exploration.random_actions=0.8 exploration.final=0.25"
    command += " exploration.anneal_steps=150"
    if resumes:
        train(f"{command} total_steps=100", tmp_path)
        command += f" resume={tmp_path}"

    def keep_exploration(self, data):
        noise, share = list(collectors[-1].policy)[-2:]
        found.append((float(noise.sigma), float(share.eps)))
        return add(self, data)

    collectors, make_collector, add = [], importlib.import_module("ddpg").make_collector, run.Progress.add

    def keep_collector(*arguments, **options):
        collectors.append(make_collector(*arguments, **options))
        return collectors[-1]

    monkeypatch.setattr(importlib.import_module("ddpg"), "make_collector", keep_collector)
    monkeypatch.setattr(run.Progress, "add", keep_exploration)
    train(command, tmp_path)
    expected = [(0.3, 0.6), (0.2, 0.4), (0.1, 0.2), (0.1, 0.2)]  # after 50, 100, 150 and 200 steps
    assert found == [pytest.approx(pair) for pair in expected[2 * resumes :]]
