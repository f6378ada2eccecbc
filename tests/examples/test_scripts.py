"""What a training script collects, writes, samples, updates, evaluates and shows."""

import importlib

import common
import numpy as np
import pytest
import show
import torch
from script_runs import SMALL, configure, train
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from training import movement


@pytest.mark.parametrize(("updates_per_step", "updates"), [(0.25, 150 // 4), (0.82, 123)])
def test_updates_are_exact(updates_per_step, updates, tmp_path):
    training = train(f"ddpg updates_per_step={updates_per_step}", tmp_path)
    assert training.counters["updates"] == updates  # 0.82 * 150 is a little less than 123


@pytest.mark.slow
@pytest.mark.parametrize(("her_ratio", "lowest", "highest"), [(0.8, 0.95, 1.0), (0.0, 0.0, 0.1)])
def test_dqn_flips_15_bits_with_hindsight_and_not_without(her_ratio, lowest, highest, tmp_path):
    """Plain DQN cannot do it. These are the script's own settings."""
    config = configure("dqn", f"hindsight.her_ratio={her_ratio}", "evaluation.interval=5000", "evaluation.episodes=200")
    training = importlib.import_module("dqn").train(config, tmp_path)
    assert lowest <= training.history["evaluation/success"][-1][1] <= highest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("script", ["dqn", "ddpg", "td3", "sac"])
def test_a_script_trains_on_the_device(script, tmp_path):
    training = train(f"{script} device=cuda normalization.enabled={script != 'dqn'}", tmp_path)
    assert training.history["evaluation/success"][-1][0] == 200
    assert training.replay_buffer.sample(32).device.type == "cuda"


def test_what_is_shown_is_what_was_trained(tmp_path):
    overrides = ["normalization.enabled=true", "evaluation.episodes=3"]
    training = train(" ".join(["ddpg", *overrides]), tmp_path)
    config = configure("ddpg", *SMALL, *overrides)
    policy = show.load_policy(config, show.find_checkpoint(tmp_path, None))
    evaluation = common.Evaluation(config)
    outcomes = evaluation(policy)
    evaluation.close()
    for name, values in outcomes.items():
        assert float(values.float().mean()) == training.history[f"evaluation/{name}"][-1][1]
    for render in (False, True):
        env = common.make_env(config.env, **(show.PIXELS if render else {}))
        seed = common.EVALUATION_SEED
        for distance in outcomes["distance"].tolist():  # the episodes of the table
            episode, seed = show.play(env, policy, seed, success="is_success")
            assert episode["achieved_goal"].shape == (16, 2)
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


def test_without_hindsight_when_writing_nothing_is_relabelled(tmp_path):
    training = train("ddpg hindsight.enabled=false hindsight.when=writing", tmp_path)
    assert len(training.replay_buffer) == 150
    assert not training.replay_buffer.sample(150)["hindsight", "relabelled"].any()


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
    run = train("ddpg buffer.prioritized=movement buffer.alpha=1 buffer.beta=0 buffer.far=10", tmp_path)
    chunks = run.replay_buffer.storage[:].split(50)
    stored = torch.cat([movement(chunk, far=10) for chunk in chunks])
    sampled = stored[run.replay_buffer.sample(32_000)["index"]]
    plain, prioritized = stored.mean(), stored.square().mean() / stored.mean()
    assert abs(sampled.mean() - prioritized) < 0.2 * (prioritized - plain)


def test_goals_have_one_statistic_and_both_places_normalize_alike():
    config = configure(
        "ddpg", "buffer.size=300", "normalization.enabled=true", "inputs=[observation,achieved_goal,desired_goal]"
    )
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
