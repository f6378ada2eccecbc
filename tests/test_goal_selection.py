"""GoalSelection: achieved goals replace the desired goals of environments, and the rewards follow."""

import copy
import math
import pickle
from functools import cache, partial

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    GymEnv,
    GymWrapper,
    ObservationNorm,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

import torchrl_her.envs
from support.factories import forked, make_buffer
from torchrl_her import (
    EnvReward,
    Feasible,
    GoalReward,
    GoalSelection,
    GoalSelector,
    HERTransform,
    LowestDensity,
    NormalizedInputs,
    SparseReward,
    Uniform,
)
from torchrl_her.goal_selectors import log_density

POINT = "torchrl_her.envs:torchrl_her/PointReach-v0"  # also registers it in other processes
BITS = partial(gymnasium.make, "torchrl_her/BitFlipping-v0", n_bits=4)


def point(**options):
    """Return an environment whose starts and goals depend on torch's seed; options are those of gymnasium.make."""
    env = GymEnv(POINT, **options)
    env.set_seed(int(torch.randint(2**31, ())))
    return env


short = partial(point, max_episode_steps=15)
ENVS = {
    "one": short,
    "serial": partial(SerialEnv, 3, short),
    "parallel": partial(ParallelEnv, 2, short, mp_start_method="fork"),
}


class Seen(GoalSelector):
    """Selects the first candidate, and remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.given, self.fitted = [], []

    def fit(self, goals, box):
        self.fitted.append((goals, box))

    def select(self, candidates, observation):
        self.given.append((candidates, observation))
        return candidates[:, 0]


@cache
def played():
    """Return 600 transitions of random play."""
    return point().rollout(600, break_when_any_done=False)


def make_hindsight(reward=None, goals=0, **arguments):
    """Return the transform of a buffer that holds some goals, and the buffer."""
    hindsight = HERTransform(reward or EnvReward(POINT), capacity=10_000, **arguments)
    rb = make_buffer(hindsight, size=10_000)
    if goals:
        rb.extend(played()[:goals].clone())
        hindsight.flush()
    return hindsight, rb


def bit_flipping():
    """Return an environment that terminates on success, and a selection of goals that were achieved there."""
    env, hindsight = GymWrapper(BITS(), categorical_action_encoding=True), HERTransform(EnvReward(BITS), capacity=1000)
    env.set_seed(0)
    make_buffer(hindsight, env.rollout(200, break_when_any_done=False))
    hindsight.flush()
    return env, GoalSelection(hindsight, Uniform(), share=1.0, start=1)


def _minus_distance(observation):
    """Return the value of goals of which only those within 0.1 are feasible at first."""
    return -30 * (observation["desired_goal"] - observation["achieved_goal"]).norm(dim=-1)


@pytest.mark.parametrize("kind", ENVS)
def test_stored_rewards_are_those_of_the_stored_goals(kind):
    hindsight, rb = make_hindsight()
    near = Feasible(_minus_distance, gamma=0.98, episode_steps=50)
    selection = GoalSelection(hindsight, Uniform(), start=60, share=0.9, feasible=near)
    env = TransformedEnv(ENVS[kind](), selection)
    check_env_specs(env)
    torch.manual_seed(0)
    env.set_seed(0)
    achieved, steps_at_goal = set(), {}
    for data in Collector(env, None, frames_per_batch=60, total_frames=360):
        for row in data.reshape(-1).unbind(0):
            own, goal = row["goal_selection", "desired_goal"], row["desired_goal"]
            trajectory = int(row["collector", "traj_ids"])
            selected = bool(row["goal_selection", "selected"])
            assert torch.equal(row["next", "desired_goal"], goal)
            assert torch.equal(row["next", "goal_selection", "desired_goal"], own)
            assert bool(row["next", "goal_selection", "selected"]) == selected
            reached = math.dist(row["next", "achieved_goal"].tolist(), goal.tolist()) <= 0.05
            assert float(row["next", "reward"]) == float(reached) - 1
            steps_at_goal[trajectory] = steps_at_goal.get(trajectory, 0) + (selected and reached)
            assert int(row["next", "goal_selection", "steps_at_goal"]) == steps_at_goal[trajectory]
            assert selected == (not torch.equal(own, goal))
            assert not selected or tuple(goal.tolist()) in achieved
        rb.extend(data.reshape(-1))
        achieved.update(map(tuple, data["next", "achieved_goal"].reshape(-1, 2).tolist()))
    report = selection.report()
    assert report.selected >= 2
    assert hindsight.report().discontinuous == 0
    assert kind == "parallel" or max(steps_at_goal.values()) > 0
    env.close(raise_if_closed=False)


def test_candidates_are_in_the_goal_table_and_observations_belong_to_the_reset():
    hindsight, rb = make_hindsight(goals=300)
    selector = Seen()
    env = TransformedEnv(SerialEnv(3, point), GoalSelection(hindsight, selector, share=1.0, start=1, candidates=20))
    data = env.rollout(120, break_when_any_done=False)
    goals = {tuple(goal) for goal in rb.storage[:]["next", "achieved_goal"].tolist()}
    assert len(selector.given) == 3  # at the first reset and after 50 and 100 steps
    for candidates, observation in selector.given:
        assert candidates.shape == (3, 20, 2)
        assert {tuple(goal) for goal in candidates.reshape(-1, 2).tolist()} <= goals
        assert observation.batch_size == (3,)
    assert torch.equal(data["observation"][:, 50], selector.given[1][1]["observation"])
    assert torch.equal(data["desired_goal"][:, 50], selector.given[1][0][:, 0])
    assert data["goal_selection", "selected"].all()
    assert len(selector.fitted) == 1


def test_environments_that_reset_together_share_a_limited_number_of_candidates(monkeypatch):
    monkeypatch.setattr("torchrl_her.goal_selection.MOST_CANDIDATES", 50)
    hindsight, _ = make_hindsight(goals=100)
    selector = Seen()
    env = TransformedEnv(SerialEnv(3, point), GoalSelection(hindsight, selector, start=1, candidates=20))
    td = env.reset()
    env.reset(td.set("_reset", torch.tensor([[True], [False], [False]])))
    assert [candidates.shape for candidates, _ in selector.given] == [(3, 16, 2), (1, 20, 2)]


def test_only_environments_that_reset_get_a_new_goal():
    hindsight, _ = make_hindsight(goals=300)
    lengths = [3, 5]
    envs = [partial(point, max_episode_steps=length) for length in lengths]
    selection = GoalSelection(hindsight, Uniform(), share=0.5, start=1)
    data = TransformedEnv(SerialEnv(2, envs), selection).rollout(90, break_when_any_done=False)
    selected, steps = data["goal_selection", "selected"], data["next", "goal_selection", "steps_at_goal"]
    ended = []
    for number, length in enumerate(lengths):
        goals = data["desired_goal"][number]
        changes = [step for step in range(1, 90) if not torch.equal(goals[step], goals[step - 1])]
        assert changes == list(range(length, 90, length))
        ended += [(bool(selected[number, end - 1]), bool(steps[number, end - 1] > 0)) for end in changes]
    report = selection.report()
    assert report.episodes == len(ended) + len(lengths)
    assert report.selected == sum(is_selected for is_selected, _ in ended)
    assert report.reached == sum(is_selected and is_reached for is_selected, is_reached in ended)


def test_a_collector_that_resets_in_place_gets_the_selected_goal():
    hindsight, rb = make_hindsight()
    env = TransformedEnv(point(), GoalSelection(hindsight, Uniform(), share=1.0, start=25))
    collector = Collector(env, None, frames_per_batch=30, total_frames=60)
    first, second = [], []
    for data in collector:
        (second if first else first).append(data.clone())
        rb.extend(data.reshape(-1))
        hindsight.flush()
        collector.reset()  # within an episode
    collector.shutdown(close_env=False)
    assert not first[0]["goal_selection", "selected"].any()
    assert second[0]["goal_selection", "selected"].all()
    assert second[0]["desired_goal"][0].tolist() in first[0]["next", "achieved_goal"].tolist()


class Here(GoalSelector):
    """Selects the goal that an environment has achieved at its reset."""

    def select(self, candidates, observation):
        return observation["achieved_goal"]


def test_a_goal_is_reached_in_its_own_episode_even_if_the_next_one_is_reset_before_its_first_step():
    hindsight, _ = make_hindsight(goals=100)
    selection = GoalSelection(hindsight, Here(), share=1.0, start=1)
    env = TransformedEnv(SerialEnv(2, point), selection)
    td = env.step(env.reset().set("action", torch.zeros(2, 2)))["next"]
    for _ in range(2):
        td = env.reset(td.set("_reset", torch.tensor([[True], [False]])))
    report = selection.report()
    assert (report.selected, report.reached) == (2, 1)
    assert td["goal_selection", "steps_at_goal"].tolist() == [[0], [1]]
    env.reset()
    report = selection.report()
    assert (report.episodes, report.selected, report.reached) == (6, 4, 2)


def test_without_selection_a_rollout_is_bit_for_bit_the_one_without_the_transform():
    hindsight, _ = make_hindsight(goals=600)
    selection, rollouts = GoalSelection(hindsight, Uniform(), share=0.0), []
    for each in (TransformedEnv(SerialEnv(2, point), selection), SerialEnv(2, point)):
        torch.manual_seed(0)
        each.set_seed(0)
        rollouts.append(each.rollout(120, break_when_any_done=False))
    with_transform = rollouts[0].exclude("goal_selection", ("next", "goal_selection"))
    assert set(with_transform.keys(True, True)) == set(rollouts[1].keys(True, True))
    assert (with_transform == rollouts[1]).all()


def test_an_episode_ends_at_the_selected_goal_and_is_truncated_at_the_goal_of_the_environment():
    env, selection = bit_flipping()
    data = TransformedEnv(env, selection).rollout(600, break_when_any_done=False)
    ends = {"selected": 0, "own": 0}
    for row in data.unbind(0):
        if not row["goal_selection", "selected"]:
            continue
        at_goal = torch.equal(row["next", "achieved_goal"], row["desired_goal"])
        at_own = torch.equal(row["next", "achieved_goal"], row["goal_selection", "desired_goal"])
        assert bool(row["next", "terminated"]) == at_goal
        assert bool(row["next", "truncated"]) >= (at_own and not at_goal)
        assert bool(row["next", "done"]) == bool(row["next", "terminated"] | row["next", "truncated"])
        ends["selected"] += at_goal
        ends["own"] += at_own and not at_goal
    assert min(ends.values()) > 3


def test_the_density_is_a_mean_of_gaussians():
    torch.manual_seed(0)
    fitted, at = torch.randn(40, 2, 3).double() * 5 + 1, torch.randn(7, 2, 3).double() * 5
    std = torch.rand(2, 3).double() + 2

    def oracle(goal):
        total = sum(math.exp(-float((((goal - each) / std) ** 2).sum()) / 2) for each in fitted)
        return math.log(total / len(fitted))

    assert log_density(at, fitted, std).tolist() == pytest.approx([oracle(goal) for goal in at])


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_the_density_of_goals_far_from_the_mean_is_precise(precision):
    torch.manual_seed(0)
    far = torch.randn(20, 32) + 3000  # 490 bandwidths from the mean
    goals = torch.cat([torch.randn(480, 32), far])
    std = 0.01 * goals.std(0)
    expected = log_density(far.double(), goals.double(), std)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        density = log_density(far, goals, std)
    finally:
        torch.set_float32_matmul_precision(before)
    assert density.tolist() == pytest.approx(expected.tolist(), abs=0.05)


def test_the_candidate_with_the_lowest_density_is_selected():
    selector = LowestDensity()
    frequent = torch.randint(10, (1000, 1)) / 10
    selector.fit(torch.cat([frequent, torch.tensor([[5.0]])]), box=torch.ones(1))
    candidates = frequent[:12].reshape(3, 4, 1).clone()
    candidates[1, 2] = 5.0
    assert selector.select(candidates, None)[1] == 5.0
    with pytest.raises(RuntimeError, match="call fit"):
        LowestDensity().select(candidates, None)


def test_the_density_is_that_of_the_first_fitted_goals():
    selector, goals, candidates = LowestDensity(fitted=50), torch.randn(200, 2), torch.randn(1, 7, 2)
    box = torch.tensor([1.0, 20.0])
    selector.fit(goals, box)
    density = log_density(candidates[0], goals[:50], 0.03 * box)
    assert torch.equal(selector.select(candidates, None)[0], candidates[0, density.argmin()])


def test_the_cutoff_follows_the_success_at_selected_goals():
    feasible = Feasible(lambda td: td["value"], gamma=0.98, episode_steps=50)
    lowest = -(1 - 0.98**40) / 0.02
    cutoffs = []
    for reached in [9, 7, 5, 3, 10, 10, 0, 0, 0, *[10] * 40]:
        feasible.update(attempts=4, reached=min(reached, 4))
        feasible.update(attempts=6, reached=max(reached - 4, 0))
        cutoffs.append(feasible.cutoff)
    assert cutoffs[:9] == [-4, -5, -5, -4, -5, -6, -5, -4, -3]
    assert min(cutoffs) == pytest.approx(lowest)
    values = TensorDict({"value": torch.tensor([lowest - 1, lowest + 0.1, 0.0])}, batch_size=3)
    assert feasible(values).tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"one value per row, \(3,\) or \(3, 1\), but returned \(\)"):
        Feasible(lambda td: td["value"].sum(), gamma=1, episode_steps=1)(values)


class OnALine(torchrl_her.envs.PointReach):
    """Starts at one end of a line, (-0.5, 0), and has its goal at the other one, (0.5, 0)."""

    def reset(self, **arguments):
        super().reset(**arguments)
        self.position[:], self.goal[:] = (-0.5, 0), (0.5, 0)
        return self._observation(), self._info()


def test_candidates_beyond_a_twentieth_of_the_box_or_the_agents_reach_are_left_out():
    inside = [(0.0, 0.0), (0.54, 0.0), (-0.54, 0.04), (0.3, -0.04)]
    feasible = Feasible(lambda td: -10.0 * (td["desired_goal"] == 0).all(1), gamma=0.98, episode_steps=50)
    hindsight, rb = make_hindsight(SparseReward(0.05))
    data = point().rollout(8)
    data["next", "achieved_goal"] = torch.tensor([*inside, (0.56, 0.0), (-0.56, 0.0), (0.0, 0.06), (0.3, -0.06)])
    rb.extend(hindsight.reward(data))
    selector = Seen()
    env = TransformedEnv(
        GymWrapper(OnALine()), GoalSelection(hindsight, selector, start=1, bounded=True, feasible=feasible)
    )
    env.reset()
    candidates, _ = selector.given[-1]
    assert selector.fitted[-1][1].tolist() == [1, 1], "a side without extent is as long as the longest one"
    assert {*map(tuple, candidates[0].tolist())} == {*map(tuple, data["next", "achieved_goal"][1:4].tolist())}


def test_a_selector_learns_the_sides_of_the_box_around_goals_and_starts_of_the_environment():
    hindsight, _ = make_hindsight(goals=600)
    selector = Seen()
    env = TransformedEnv(point(), GoalSelection(hindsight, selector, start=1))
    first = torch.stack([env.rollout(1)[0] for _ in range(25)])[:21]
    of_episodes = torch.cat([first["goal_selection", "desired_goal"], first["achieved_goal"]])
    goals, box = selector.fitted[-1]  # at the 21st reset
    assert torch.equal(box, of_episodes.amax(0) - of_episodes.amin(0))
    assert goals.shape == (600, 2)


def test_the_environments_own_goal_is_kept_if_no_candidate_is_allowed():
    hindsight, _ = make_hindsight(goals=600)
    never = Feasible(lambda td: torch.full((len(td),), -1e9), gamma=0.98, episode_steps=50)
    env = TransformedEnv(point(), GoalSelection(hindsight, Uniform(), share=1.0, start=1, feasible=never))
    rollout = env.rollout(200, break_when_any_done=False)
    assert not rollout["goal_selection", "selected"].any()
    assert torch.equal(rollout["desired_goal"], rollout["goal_selection", "desired_goal"])


def test_fewer_goals_are_selected_the_more_often_the_agent_reaches_those_of_the_environment():
    count = 3
    hindsight, _ = make_hindsight(goals=600)
    env = TransformedEnv(SerialEnv(count, point), GoalSelection(hindsight, Uniform(), share=0.8, start=1))

    def aim(td):  # reaches each goal within 50 steps
        return td.set("action", 4 * (td["desired_goal"] - td["achieved_goal"]) - td["observation"][..., 2:])

    parts = [env.rollout(50 * episodes, policy, break_when_any_done=False).unflatten(1, (episodes, 50))
             for policy, episodes in ((None, 20), (aim, 80))]  # fmt: skip
    selected, success = [part["goal_selection", "selected"][..., 0, 0] for part in parts], 0.0  # [envs, episodes]
    for part, is_selected in zip(parts, selected, strict=True):
        for episode in range(part.shape[1]):
            for each in range(count):
                if not is_selected[each, episode]:
                    reached = (part["next", "reward"][each, episode] == 0).any()
                    success += 0.05 * (float(reached) - success)
    assert env.transform.report().success == pytest.approx(success, abs=0.06)  # the last episodes have not ended
    assert selected[0].double().mean() > 0.65
    assert success > 0.95
    assert selected[1][:, -20:].double().mean() < 0.1


def test_a_saved_selection_goes_on_as_if_it_had_not_stopped():
    hindsight, _ = make_hindsight(goals=600)
    feasible = partial(Feasible, lambda td: -td["desired_goal"].norm(dim=-1), gamma=0.98, episode_steps=50)

    def make():
        selector = LowestDensity()
        arguments = {"share": 0.6, "start": 1, "bounded": True, "feasible": feasible()}
        return TransformedEnv(short(), GoalSelection(hindsight, selector, **arguments))

    env, other = make(), make()
    env.rollout(75, break_when_any_done=False)
    other.load_state_dict(env.state_dict())
    rollouts = []
    for each in (env, other):
        torch.manual_seed(1)
        each.set_seed(1)
        rollouts.append(each.rollout(270, break_when_any_done=False))
    assert (rollouts[0] == rollouts[1]).all()
    assert env.transform.report() == other.transform.report()
    assert env.transform.report().episodes > 20


def test_a_copy_reads_the_same_goals():
    hindsight, rb = make_hindsight()
    selection = copy.deepcopy(GoalSelection(hindsight, Uniform(), share=1.0, start=50))
    rb.extend(point().rollout(50))
    assert selection.hindsight is hindsight
    assert TransformedEnv(point(), selection).rollout(3)["goal_selection", "selected"].all()


@pytest.mark.parametrize("run", [lambda test: test(), forked], ids=["same process", "another process"])
def test_an_unpickled_environment_reads_the_goals_of_the_buffer_that_was_pickled_with_it(run):
    hindsight, rb = make_hindsight()
    env = TransformedEnv(point(), GoalSelection(hindsight, Uniform(), share=1.0, start=50))
    pickled = [pickle.dumps({"env": env, "rb": rb}), pickle.dumps({"rb": rb, "env": env})]

    def load_and_collect():
        for each in pickled:
            loaded = pickle.loads(each)
            copied, copied_rb = loaded["env"], loaded["rb"]
            assert not copied.rollout(50)["goal_selection", "selected"].any()
            copied_rb.extend(copied.rollout(50))
            assert copied.rollout(3)["goal_selection", "selected"].all()

    assert not run(load_and_collect)
    assert hindsight.table_size == 0, "the original has its own goals"


def test_an_environment_unpickled_without_its_buffer_is_refused():
    hindsight, _rb = make_hindsight()
    env = TransformedEnv(point(), GoalSelection(hindsight, Uniform(), share=1.0, start=50))
    pickled = pickle.dumps(env)

    def load_elsewhere():
        with pytest.raises(RuntimeError, match="is in another process than the buffer"):
            pickle.loads(pickled).reset()

    assert not forked(load_elsewhere)
    alone = pickle.loads(pickled)
    with pytest.raises(RuntimeError, match=r"unpickled without its replay buffer, pickle both together"):
        alone.reset()
    with pytest.raises(RuntimeError, match="unpickled without its replay buffer"):
        TransformedEnv(point(), copy.deepcopy(alone.transform)).reset()
    env.reset()
    TransformedEnv(point(), copy.deepcopy(env.transform)).reset()


def test_the_report_can_be_read():
    hindsight, _ = make_hindsight(goals=600)
    near = Feasible(_minus_distance, gamma=0.98, episode_steps=50)
    selection = GoalSelection(hindsight, Uniform(), share=1.0, start=50, feasible=near)
    assert str(selection.report()).splitlines()[1:] == [
        "  episodes        0",
        "  goal reached    0 of 0 selected goals",
        "                  0% of about the last 20 goals of the environment",
        "  cutoff          -3, below which no goal is feasible",
    ]
    env = TransformedEnv(point(), selection)
    for _ in range(8):
        env.rollout(3)
    report = selection.report()
    share = f"{report.reached:,} of {report.selected:,} selected goals, {report.reached / report.selected:.1%}"
    assert str(report).startswith(f"GoalSelection\n  episodes        8\n  goal reached    {share}")
    assert "cutoff" not in str(GoalSelection(hindsight, Uniform()).report())


def test_misuse_is_refused():
    hindsight, _ = make_hindsight(goals=100)
    rb = make_buffer(GoalSelection(hindsight, Uniform()), point().rollout(3), batch_size=2)
    with pytest.raises(ValueError, match="is a transform of environments"):
        rb.sample()

    class Wrong(GoalSelector):
        def select(self, candidates, observation):
            return candidates

    with pytest.raises(ValueError, match=r"one goal for each environment, \(1, 2\), but returned \(1, 500, 2\)"):
        TransformedEnv(point(), GoalSelection(hindsight, Wrong(), start=1)).reset()
    env = TransformedEnv(point(), GoalSelection(hindsight, Uniform(), start=1))
    env.reset()
    with pytest.raises(KeyError, match="of the previous step at the root"):
        env.step(TensorDict({"action": torch.zeros(2)}))
    with pytest.raises(KeyError, match="has no desired goal 'desired_goal'"):
        check_env_specs(TransformedEnv(GymEnv("Pendulum-v1"), GoalSelection(hindsight, Uniform())))
    selection = GoalSelection(hindsight, Uniform(), start=1)
    with pytest.raises(ValueError, match="NormalizedInputs comes before GoalSelection"):
        TransformedEnv(point(), Compose(NormalizedInputs(), selection)).reset()
    data = TransformedEnv(point(), Compose(selection, inputs := NormalizedInputs(clip=math.inf))).rollout(5)
    assert torch.equal(data["inputs"], torch.cat([data["observation"], data["desired_goal"]], -1))
    assert not inputs.mean.any()


def test_an_environment_that_changes_its_goal_within_an_episode_is_refused():
    class Moving(torchrl_her.envs.PointReach):
        def step(self, action):
            self.goal = self.goal + 0.1
            return super().step(action)

    hindsight, _ = make_hindsight(SparseReward(0.05))
    env = TransformedEnv(GymWrapper(Moving()), GoalSelection(hindsight, Uniform()))
    with pytest.raises(ValueError, match="changed its desired goal within an episode"):
        env.rollout(3)


def _in_worker(hindsight):
    return TransformedEnv(point(), GoalSelection(hindsight, Uniform(), share=1.0, start=50))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_collector_of_another_process_needs_a_shared_goal_table(shared):
    spec = {"goal_spec": point().observation_spec["achieved_goal"]} if shared else {}
    hindsight = HERTransform(EnvReward(POINT), capacity=10_000, **spec)
    storage = LazyTensorStorage(10_000, shared_init=shared)
    rb = ReplayBuffer(storage=storage, transform=hindsight, shared=shared)
    make_collector = partial(MultiSyncCollector, [partial(_in_worker, hindsight)], None, frames_per_batch=100)
    if not shared:
        with pytest.raises(RuntimeError, match=r"their goal table must be shared.*create the buffer with shared=True"):
            make_collector(total_frames=600)
        return
    collector = make_collector(total_frames=600)
    selected = []
    for data in collector:
        rb.extend(data.reshape(-1))
        selected.append(bool(data["goal_selection", "selected"].any()))
    collector.shutdown()
    assert not selected[0]
    assert selected[-1]


@pytest.mark.parametrize("shared", [True, False])
def test_workers_of_a_batched_environment_need_a_shared_goal_table(shared, capfd):
    spec = {"goal_spec": point().observation_spec["achieved_goal"]} if shared else {}
    hindsight = HERTransform(EnvReward(POINT), capacity=1000, **spec)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(1000, shared_init=shared), transform=hindsight, shared=shared, batch_size=32
    )
    env = ParallelEnv(1, partial(_in_worker, hindsight), mp_start_method="fork")
    if not shared:
        with pytest.raises(RuntimeError, match="worker"):
            env.reset()
        assert "their goal table must be shared" in capfd.readouterr().err
        return
    first = env.rollout(50)
    rb.extend(first.reshape(-1))
    second = env.rollout(3)
    env.close()
    assert not first["goal_selection", "selected"].any()
    assert second["goal_selection", "selected"].all()
    goals = {tuple(goal) for goal in first["next", "achieved_goal"].reshape(-1, 2).tolist()}
    assert {tuple(goal) for goal in second["desired_goal"].reshape(-1, 2).tolist()} <= goals


def test_other_transforms_come_after():
    hindsight, _ = make_hindsight(goals=600)
    env = TransformedEnv(point(), Compose(GoalSelection(hindsight, Uniform(), share=1.0, start=1), StepCounter(7)))
    check_env_specs(env)
    assert (env.rollout(20, break_when_any_done=False)["step_count"] < 7).all()


class InDouble(gymnasium.ObservationWrapper):
    """Returns observations in double precision, with values that single precision cannot represent."""

    def __init__(self):
        super().__init__(gymnasium.make(POINT))
        self.observation_space = gymnasium.spaces.Dict(
            {key: gymnasium.spaces.Box(-9, 9, space.shape, float) for key, space in self.observation_space.items()}
        )

    def observation(self, observation):
        return {key: value.astype(float) + 1e-12 for key, value in observation.items()}


def test_a_later_transform_may_change_the_dtype_of_goals():
    hindsight, _ = make_hindsight(goals=600)
    selection = GoalSelection(hindsight, Uniform(), share=0.5, start=1)
    env = TransformedEnv(GymWrapper(InDouble()), Compose(selection, DoubleToFloat()))
    data = env.rollout(600, break_when_any_done=False)
    selected = data["goal_selection", "selected"].squeeze(-1)
    assert 0 < selected.double().mean() < 1
    assert data["desired_goal"].dtype is torch.float32
    assert torch.equal(data["desired_goal"], data["next", "desired_goal"])
    assert torch.equal(data["desired_goal"][~selected], data["goal_selection", "desired_goal"][~selected])
    table = {tuple(goal) for goal in hindsight.random_goals(50_000).tolist()}
    assert {tuple(goal) for goal in data["desired_goal"][selected].tolist()} <= table


def test_a_later_transform_that_changes_goals_is_refused():
    hindsight, _ = make_hindsight(goals=600)
    later = ObservationNorm(0.5, 2.0, in_keys=["desired_goal"])
    env = TransformedEnv(point(), Compose(GoalSelection(hindsight, Uniform(), share=0.0), later))
    with pytest.raises(ValueError, match="a transform after GoalSelection changes it"):
        env.rollout(3)


def test_goals_without_dimensions_can_be_left_out():
    hindsight = HERTransform(GoalReward(torch.eq), capacity=1000)
    selection = GoalSelection(hindsight, Uniform(), bounded=True)
    selection._enlarge_box(torch.tensor([0.0, 1.0]))
    allowed = selection._allowed(torch.tensor([[0.5, 2.0], [-1.0, 1.0]]), TensorDict(batch_size=2))
    assert allowed.tolist() == [[True, False], [False, True]]


def test_episodes_end_without_a_truncated_flag():
    env, selection = bit_flipping()
    before = TransformedEnv(env, selection).reset().set("action", torch.tensor(0))
    after = before.select("achieved_goal").set("desired_goal", before["goal_selection", "desired_goal"])
    after["reward"] = torch.zeros(1)
    after["terminated"] = after["done"] = torch.ones(1, dtype=torch.bool)
    before["desired_goal"] = 1 - before["achieved_goal"]  # not reached
    selection._step(before, after)
    assert after["done"]
    assert not after["terminated"]
    assert "truncated" not in after
