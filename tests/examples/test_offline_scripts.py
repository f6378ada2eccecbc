"""`pointmaze_data.py` generates data, and `offline.py` trains from data alone."""

import math
import sys

import numpy as np
import pytest
import torch
from script_runs import configure as configure_script
from tensordict import TensorDict

from torchrl_her import load_ogbench

pytest.importorskip("ogbench", reason="ogbench is missing: labmaze, which it needs, has no wheels for Python 3.13")
import pointmaze_data

import offline

ENV, EPISODES, STEPS = "pointmaze-medium-v0", 3, 80
SMALL = ["batch_size=16", "hidden=[8]", "evaluation.episodes=1", "matmul_precision=highest"]
ALGORITHMS = ["gcbc", "gciql", "hiql", "crl"]


# Data


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file with the data of a few short episodes."""
    path = tmp_path_factory.mktemp("data") / "maze.npz"
    with pytest.MonkeyPatch.context() as patch:
        arguments = f"{ENV} --episodes {EPISODES} --steps {STEPS} --seed 1 --output {path}"
        patch.setattr(sys, "argv", ["pointmaze_data.py", *arguments.split()])
        pointmaze_data.main()
        with pytest.raises(SystemExit, match="exists already: remove it, or choose another --output"):
            pointmaze_data.main()
    return path


def test_data_are_whole_episodes_that_a_seed_repeats(path):
    data = load_ogbench(path)
    assert len(data) == EPISODES * (STEPS - 1)  # transitions
    assert data["next", "done"].flatten().nonzero().flatten().tolist() == [77 + 79 * i + 1 for i in range(EPISODES)]
    for episode in data.split(STEPS - 1):
        assert torch.equal(episode["observation"][1:], episode["next", "observation"][:-1])
    assert data["action"].abs().max() == 1
    moved = (data["next", "observation"] - data["observation"]).norm(dim=-1)
    assert moved.max() < 0.2 * math.sqrt(2) + 0.01  # an action moves the point by 0.2, except into walls
    again = pointmaze_data.generate(ENV, EPISODES, STEPS, seed=1)
    with np.load(path) as file:
        assert all(np.array_equal(file[name], again[name]) for name in file.files)
    assert not np.array_equal(again["actions"], pointmaze_data.generate(ENV, EPISODES, STEPS, seed=2)["actions"])


def test_without_noise_every_action_points_at_the_center_of_a_free_cell_nearby(monkeypatch):
    monkeypatch.setattr(pointmaze_data, "NOISE", 0.0)
    data, maze = pointmaze_data.generate(ENV, 2, 200, seed=0), offline.gymnasium.make(ENV).unwrapped
    cells = set()
    for state, action in zip(data["observations"], data["actions"], strict=True):
        row, column = maze.xy_to_ij(state)
        cells.add((row, column))
        near = [(row + i, column + j) for i, j in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))]
        ways = [maze.ij_to_xy(cell) - state for cell in near if not maze.maze_map[cell]]
        assert min(np.linalg.norm(action - way / np.linalg.norm(way)) for way in ways) < 1e-3
    assert len(cells) > 10  # new goals, one after the other
    assert not any(maze.maze_map[cell] for cell in cells)


# Goals


def test_states_are_normalized(path):
    raw, (data, normalize) = load_ogbench(path), offline.load_data(configure(path))
    assert data["observation"].mean(0).abs().max() < 1e-4
    assert data["observation"].std(0).tolist() == pytest.approx([1, 1], abs=1e-4)
    for key in ("observation", ("next", "observation")):
        assert torch.equal(data[key], normalize(raw[key]))


def configure(path, *overrides):
    return configure_script("offline", f"data={path}", *SMALL, *overrides)


def locate(states, goals):
    """The index of each goal among the states, ``int64 [n]``."""
    distance, index = torch.cdist(goals, states, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    assert not distance.any()
    return index


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_and_policies_have_goals_of_their_own(algorithm, path):
    torch.manual_seed(0)
    config = configure(path, f"algorithm={algorithm}", "batch_size=125")
    data, _ = offline.load_data(config)
    batch = offline.make_replay_buffer(config, data).sample()
    row, outcomes = locate(data["observation"], batch["observation"]), data["next", "observation"]
    end = (row // (STEPS - 1) + 1) * (STEPS - 1) - 1  # the last transition of the episode
    goals = {key: locate(outcomes, batch[key]) for key in batch.keys() if "goal" in key}  # noqa: SIM118
    of_policy = {"gcbc": "desired_goal", "gciql": "actor_goal", "hiql": "high_goal", "crl": "actor_goal"}
    later = goals.pop(of_policy[algorithm])
    assert ((later > row) | (row == end)).all()
    assert (later <= end).all()
    if algorithm == "hiql":
        assert torch.equal(goals.pop("low_goal"), torch.minimum(row + 25, end))
        assert torch.equal(goals.pop("subgoal"), torch.minimum(row + 25, later))
    if algorithm == "crl":
        steps = goals.pop("desired_goal") - row
        assert ((steps > 0) | (row == end)).all()
        assert (row + steps <= end).all()
        to_end = end - row
        expected = (1 - 0.99**to_end) * 0.99 / 0.01  # of a geometric number of steps, at most `to_end`
        assert steps.float().mean() == pytest.approx(expected.mean().item(), rel=0.1)
    elif algorithm != "gcbc":
        value = goals.pop("desired_goal")
        reached = (value == row).unsqueeze(1)
        assert torch.equal(batch["next", "reward"], reached.float() - 1)
        assert torch.equal(batch["next", "terminated"], reached)
        # A fifth is the transition's own outcome, as is the geometric one of the last transition of an episode.
        assert reached.float().mean() == pytest.approx(0.21, abs=0.03)
        assert (value // (STEPS - 1) == row // (STEPS - 1)).float().mean() == pytest.approx(0.7 + 0.3 / 3, abs=0.04)
    assert not goals


# Losses


def make_loss(algorithm, path):
    config = configure(path, f"algorithm={algorithm}", "gamma=0.9")
    torch.manual_seed(0)
    batch = offline.make_replay_buffer(config, offline.load_data(config)[0]).sample()[:12]
    batch = batch.apply(lambda each: each.double() if each.is_floating_point() else each)
    for key in ("observation", ("next", "observation"), *(key for key in batch.keys() if "goal" in key)):  # noqa: SIM118
        batch[key] = torch.randn_like(batch[key])  # so that all differ, and values have different signs
    batch["next", "desired_goal"] = batch["desired_goal"]
    loss, _ = offline.make_loss(config, batch)
    loss.double()
    owners = [name for name, _ in loss.named_children() if name.endswith("params")]
    for name in owners:  # as after updates; the target networks differ from the others
        getattr(loss, name).data.apply_(lambda each: each.add_(0.4 * torch.randn_like(each)))
    return loss, batch


def by_rows(module, params, *keys):
    """A function of one row of each entry, by plain calls of a network with its parameters."""

    def function(*rows):
        with torch.no_grad(), params.to_module(module):
            written = module(TensorDict({key: row[None] for key, row in zip(keys, rows, strict=True)}, 1))
        return written.get(module.out_keys[-1])[0].tolist()

    return function


def log_prob(mean, action):
    """The log-probability of a normal distribution with standard deviation 1."""
    return sum(-0.5 * (x - y) ** 2 - 0.5 * math.log(2 * math.pi) for x, y in zip(mean, action, strict=True))


def expectile(difference, share):
    return (share if difference >= 0 else 1 - share) * difference**2


def mean_of(values):
    values = list(values)
    return sum(values) / len(values)


def test_gciql_has_the_losses_of_iql_and_an_actor_that_maximizes_values_and_clones(path):
    loss, batch = make_loss("gciql", path)
    values = loss(batch)
    inputs = ("observation", "desired_goal")
    policy = by_rows(loss.actor_network.module[0], loss.actor_network_params["module", "0"], *inputs)
    value = by_rows(loss.value_network, loss.value_network_params, *inputs)
    critics, targets = (
        [by_rows(loss.qvalue_network, each, *inputs, "action") for each in params.unbind(0)]
        for params in (loss.qvalue_network_params, loss.target_qvalue_network_params)
    )
    losses, best, cloned = {"loss_value": [], "loss_qvalue": []}, [], []
    for row in batch.unbind(0):
        state, action, goal, actor_goal = map(row.get, ("observation", "action", "desired_goal", "actor_goal"))
        lowest = min(target(state, goal, action)[0] for target in targets)
        losses["loss_value"].append(expectile(lowest - value(state, goal)[0], 0.9))
        future = 0.0 if row["next", "terminated"] else value(row["next", "observation"], goal)[0]
        backup = row["next", "reward"].item() + 0.9 * future
        losses["loss_qvalue"].append(sum((critic(state, goal, action)[0] - backup) ** 2 for critic in critics))
        mean = policy(state, actor_goal)
        acted = torch.tensor(mean, dtype=torch.float64).clamp(-1, 1)
        best.append(min(critic(state, actor_goal, acted)[0] for critic in critics))
        cloned.append(log_prob(mean, action.tolist()))
    for name, terms in losses.items():
        assert values[name].item() == pytest.approx(mean_of(terms))
    actor_loss = -mean_of(best) / mean_of(map(abs, best)) - 0.003 * mean_of(cloned)
    assert values["loss_actor"].item() == pytest.approx(actor_loss)


def test_crl_tells_goals_apart_and_has_an_actor_that_maximizes_and_clones(path):
    loss, batch = make_loss("crl", path)
    values = loss(batch)
    policy = by_rows(
        loss.actor_network.module[0], loss.actor_network_params["module", "0"], "observation", "desired_goal"
    )

    def logits(row, goal, action):
        """The logits of both critics of a state, an action and a goal."""
        represented = TensorDict({"observation": row["observation"], "action": action, "desired_goal": goal})[None]
        with torch.no_grad(), loss.critic_network_params.to_module(loss.critic_network):
            loss.critic_network(represented)
        pairs, goals = represented["pairs"][0], represented["goals"][0]
        assert pairs.shape == goals.shape == (2, 8)
        return [sum(x * y for x, y in zip(*each, strict=True)) / 8**0.5 for each in zip(pairs, goals, strict=True)]

    rows, errors, best, cloned = batch.unbind(0), [], [], []
    for i, row in enumerate(rows):
        for j, other in enumerate(rows):
            for logit in logits(row, other["desired_goal"], row["action"]):
                probability = 1 / (1 + math.exp(-logit))
                errors.append(-math.log(probability if i == j else 1 - probability))
        mean = policy(row["observation"], row["actor_goal"])
        acted = torch.tensor(mean, dtype=torch.float64).clamp(-1, 1)
        best.append(min(logits(row, row["actor_goal"], acted)).item())
        cloned.append(log_prob(mean, row["action"].tolist()))
    assert values["loss_critic"].item() == pytest.approx(mean_of(errors))
    assert values["loss_actor"].item() == pytest.approx(
        -mean_of(best) / mean_of(map(abs, best)) - 0.03 * mean_of(cloned)
    )


def test_hiql_learns_values_and_clones_both_levels_by_their_advantages(path):
    loss, batch = make_loss("hiql", path)
    values = loss(batch)
    inputs = ("observation", "desired_goal")
    value, target = (
        by_rows(loss.value_network, params, *inputs)
        for params in (loss.value_network_params, loss.target_value_network_params)
    )
    represent = by_rows(loss.value_network[0], loss.value_network_params["module", "0"], *inputs)
    high = by_rows(loss.high_actor.module[0], loss.high_actor_params["module", "0"], *inputs)
    low = by_rows(loss.low_actor.module[0], loss.low_actor_params["module", "0"], "observation", "representation")
    losses = {"loss_value": [], "loss_high_actor": [], "loss_low_actor": []}
    for row in batch.unbind(0):
        state, outcome, goal = row["observation"], row["next", "observation"], row["desired_goal"]
        future = [0.0, 0.0] if row["next", "terminated"] else target(outcome, goal)
        backups = [row["next", "reward"].item() + 0.9 * each for each in future]
        share = 0.7 if min(backups) >= mean_of(target(state, goal)) else 0.3
        pairs = zip(backups, value(state, goal), strict=True)
        losses["loss_value"].append(sum(share * (backup - present) ** 2 for backup, present in pairs))
        for level, goal, reached in (("high", row["high_goal"], row["subgoal"]), ("low", row["low_goal"], outcome)):
            weight = min(100.0, math.exp(3.0 * (mean_of(value(reached, goal)) - mean_of(value(state, goal)))))
            if level == "high":
                cloned = log_prob(high(state, goal), represent(state, reached))
            else:
                goal = torch.tensor(represent(state, goal), dtype=torch.float64)
                cloned = log_prob(low(state, goal), row["action"].tolist())
            losses[f"loss_{level}_actor"].append(-weight * cloned)
    for name, terms in losses.items():
        assert values[name].item() == pytest.approx(mean_of(terms))
    assert math.hypot(*goal) == pytest.approx(math.sqrt(10))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_loss_changes_only_its_own_networks(algorithm, path):
    loss, batch = make_loss(algorithm, path)
    owners = {
        "gcbc": {"loss_bc": "actor_network_params"},
        "gciql": {f"loss_{name}": f"{name}_network_params" for name in ("actor", "qvalue", "value")},
        "hiql": {"loss_value": "value_network_params"}
        | {f"loss_{level}_actor": f"{level}_actor_params" for level in ("high", "low")},
        "crl": {f"loss_{name}": f"{name}_network_params" for name in ("actor", "critic")},
    }[algorithm]
    values = loss(batch)
    assert {*values.keys()} == {*owners}
    for name, owner in owners.items():
        loss.zero_grad()
        values[name].backward(retain_graph=True)
        changed = {each.split(".")[0] for each, p in loss.named_parameters() if p.grad is not None and p.grad.any()}
        assert changed == {owner}


# Runs


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_short_run_learns_logs_and_saves(algorithm, path, run_script, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    options = [f"algorithm={algorithm}", f"data={path}", *SMALL, "updates=20", "evaluation.interval=10"]
    printed = run_script("offline", *options, "hydra.run.dir=run")
    assert printed.splitlines()[-1].startswith("20 updates: success ")
    logs = tmp_path / "run" / "logs" / "csv" / "scalars"
    tasks = [np.loadtxt(logs / "evaluation" / f"task{task}.csv", delimiter=",") for task in range(1, 6)]
    success = np.loadtxt(logs / "evaluation" / "success.csv", delimiter=",")
    assert success[:, 0].tolist() == [10, 20]
    assert success[:, 1] == pytest.approx(np.mean(tasks, axis=0)[:, 1])
    with pytest.raises(SystemExit, match=r"no run of dqn\.py, ddpg\.py, td3\.py, sac\.py in run/"):
        run_script("show", "run")
    compared = run_script("compare", "run")
    assert "At 20 updates:\n\n| | runs | success: median (range) | training, s |" in compared
    assert f"| algorithm={algorithm} | 1 | {success[-1, 1]:.2f} |" in compared
    saved = torch.load(tmp_path / "run" / "policy.pt")
    assert any(key.endswith("mean") for key in saved)  # it reads raw states


def test_a_policy_that_knows_the_way_succeeds(path):
    config, maze = configure(path, "evaluation.episodes=2"), offline.gymnasium.make(ENV).unwrapped
    asked, visited = [], []

    def act(states, goals):
        asked.append(goals)
        visited.append(states.clone())
        ways = []
        for state, goal in zip(states.numpy(), goals.numpy(), strict=True):
            waypoint, _ = maze.get_oracle_subgoal(state, goal)
            ways.append((goal if maze.xy_to_ij(state) == maze.xy_to_ij(goal) else waypoint) - state)
        return 5 * torch.nn.functional.normalize(torch.tensor(np.array(ways)).float(), dim=-1)  # is clipped

    policy = offline.TensorDictModule(act, ["observation", "desired_goal"], ["action"])
    evaluation = offline.Evaluation(config)
    assert evaluation.run(policy) == {"success": 1.0} | {f"task{task}": 1.0 for task in range(1, 6)}
    assert len(asked[0]) == 10  # five tasks, two episodes
    assert (visited[1] - visited[0]).norm(dim=-1).max() < 0.2 * math.sqrt(2) + 0.01  # the actions are clipped
    calls = len(asked)
    evaluation.run(policy)
    assert torch.equal(asked[0], asked[calls])  # the same goals
    stay = offline.TensorDictModule(torch.zeros_like, ["observation"], ["action"])
    assert evaluation.run(stay)["success"] == 0


def test_settings_that_cannot_work_are_refused(path):
    with pytest.raises(SystemExit, match=r"no file nowhere: python examples/pointmaze_data\.py writes"):
        configure("nowhere")
    with pytest.raises(SystemExit, match=r"evaluation\.episodes=0: Input should be greater than 0"):
        configure(path, "evaluation.episodes=0")
