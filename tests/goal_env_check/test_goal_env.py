"""check_goal_env finds planted mistakes, and nothing in correct environments."""

import json
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymWrapper, StepCounter, TransformedEnv

from support.goal_envs import CORRECT, FAULTS, Grid, Reach, computing, missed, showing, variant
from torchrl_her import EnvReward, HERKeys, SparseReward, __main__, check_goal_env
from torchrl_her.envs import PointReach
from torchrl_her.goal_env_check.finding import FINDINGS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "check-goal-env.md"
ROBOTICS = ["FetchPush-v4", "FetchReachDense-v4", "HandManipulatePen-v1", "PointMaze_LargeDense-v3", "AntMaze_UMaze-v5"]


def names(found):
    return [finding.name for finding in found]


def all_names(report):
    return {*names(report.errors), *names(report.warnings), *names(report.notes)}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_environment_has_no_errors_and_no_warnings(name):
    report = check_goal_env(CORRECT[name](), steps=600)
    assert not report.errors
    assert not report.warnings
    assert report.steps == 600


@pytest.mark.parametrize("name", ROBOTICS)
def test_environments_of_gymnasium_robotics_are_correct(name):
    report = check_goal_env(name, steps=250)
    assert not report.errors
    assert not report.warnings
    assert set(names(report.notes)) <= {"no-goal-reached", "reward-not-batched"}
    assert ("reward-not-batched" in names(report.notes)) == ("Pen" in name)


# Parts of the message of a finding: the numbers and names that show the mistake.
MESSAGES = {
    "reward-differs: sign": "step returned reward=1 and compute_reward -1 (",
    "reward-differs: shaping": " (400 of 400 steps; the first is step 0 of episode 0, ",
    "reward-ignores-desired-goal: current goal": "the desired goal and for another one, it returns",
    "reward-ignores-achieved-goal: current state": "achieved goal and for another one, it returns 0 and 0",
    "reward-depends-on-state: step count": "and after the last episode, it returned -1.01 and -1 (in 200 of 200",
    "reward-modifies-arguments: achieved goal": "modifies its argument achieved_goal (in 2,200 of 2,200 calls)",
    "reward-constant: nothing is reached": "returned -1 for all 2,000 pairs of goals",
    "reward-constant: everything is reached": "returned 0 for all 2,000 pairs of goals",
    "reward-misses-achieved-goal: sign": "returns 0 where the achieved goal is the desired one, and 1 where another",
    "reward-fails: other goals": "compute_reward failed: KeyError",
    "reward-needs-info: energy": "reads 'energy' from info",
    "success-differs: threshold": "info['is_success'] is False where the reward is 0",
    "terminated-fails: other goals": "compute_terminated failed: KeyError",
    "terminated-not-batched: bool": "compute_terminated failed with 256 pairs of goals (ValueError",
    "terminated-differs: fall": "step returned terminated=1 and compute_terminated 0",
    "terminated-one-verdict: norm": "returns a single value, False, for a batch in which 173 of 256 pairs",
    "goal-shapes-differ": "The achieved goal has the shape (2,) and the desired goal (3,)",
    "goal-dtypes-differ: float64 and float32": "The achieved goal has the dtype float64 and the desired goal float32",
    "desired-goal-far: centimetres": "in dimension 0, desired goals are in [-91.81, 99.44], and achieved",
    "achieved-goal-stale-at-reset: always": "In 9 of 10 episodes, the achieved goal at reset is the last one",
    "desired-goal-changes: after 20 steps": "in 10 of 400 steps; the first is step 20 of episode 0",
    "desired-goal-in-observation: goal": "The features [2, 3] of the observation contain the desired goal",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found_with_its_numbers_and_is_the_only_error(fault):
    name = fault.split(":")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check_goal_env(FAULTS[fault](), steps=400)
    found = {finding.name: finding.message for finding in report.errors + report.warnings + report.notes}
    assert MESSAGES.get(fault, "") in found[name]
    assert set(names(report.errors)) == ({name} if FINDINGS[name][0] == "error" else set())
    assert not name.startswith("terminated") or not [each for each in found if each.startswith("reward")]


@pytest.mark.parametrize("seed", range(4))
def test_a_reward_for_the_current_goal_is_not_mistaken_for_a_wrong_sign(seed):
    """With seed 0, random actions reach no goal, and one achieved goal is near the last goal of the environment."""

    class Wrong(PointReach):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return super().compute_reward(achieved_goal, self.goal, info)

    (name,) = names(check_goal_env(Wrong, seed=seed).errors)
    assert name in ("reward-ignores-desired-goal", "reward-constant")


def test_every_finding_is_tested_and_is_in_the_table_of_the_page():
    page = PAGE.read_text()
    rows = re.findall(r"^\| (`.*?) \| (error|warning|note) \| .+ \|$", page, re.M)
    listed = sorted((severity, name) for cell, severity in rows for name in re.findall(r"`(.*?)`", cell))
    assert listed == sorted((severity, name) for name, (severity, _) in FINDINGS.items())
    assert set(re.findall(r"^### (.*)$", page, re.M)) <= FINDINGS.keys()
    assert {fault.split(":")[0] for fault in FAULTS} == FINDINGS.keys()


# Reads of entries of info: methods of dict.
READS = {
    "pop": lambda info: info.pop("energy"),
    "setdefault": lambda info: info.setdefault("energy", 0.0),
    "popitem": lambda info: info.popitem(),
    "copy": lambda info: info.copy()["energy"],
    "|": lambda info: (info | {})["energy"],
    "| on the right": lambda info: ({} | info)["energy"],
    "unpacking": lambda info: {**info},
    "in keys": lambda info: "energy" in info.keys(),  # noqa: SIM118
    "reversed": lambda info: list(reversed(info)),
    "==": lambda info: info == {},
    "json": json.dumps,
    "none": lambda info: info or {},
}


@pytest.mark.parametrize("way", READS)
def test_an_entry_of_info_is_found_however_it_is_read(way):
    def reading(self, achieved, desired, info):
        READS[way](info)
        return missed(achieved, desired)

    info = FAULTS["reward-needs-info: energy"].info
    env = computing(reading, reward_of_step=lambda s, a, d, i: missed(a, d), info=info)()
    report = check_goal_env(env, steps=60, ignore=["reward-not-batched", "no-goal-reached"])
    assert all_names(report) == ({"reward-needs-info"} if way != "none" else set())
    assert not report.warnings or "reads 'energy' from info" in report.warnings[0].message


def test_a_threshold_is_compared_with_the_length_of_a_step():
    def numbers_and_name(**members):
        report = check_goal_env(variant(**members)(), steps=600)
        (finding,) = report.warnings + report.notes
        numbers = re.findall(r"(?:moves by|by at most) ([\d.e-]+\d)", finding.message)
        return [float(number) for number in numbers], finding.name

    (median, largest), name = numbers_and_name(threshold=1e-6)
    assert 0.1 < median < 0.2 < largest < 0.283
    assert name == "threshold-too-small"
    far = {"draw_goal": lambda s: s.np_random.uniform(1.3, 1.4, 2)}
    grids = [{"base": Grid, "width": width, "threshold": limit} for width, limit in ((1 / 64, 0.0), (0.02, 1e-6))]
    for members in (far, *grids):  # the goals of grids are reached exactly
        assert numbers_and_name(**members)[1] == "no-goal-reached"


def test_a_report_prints_its_findings_by_severity_except_for_ignored_ones():
    unbatched, ending = FAULTS["reward-not-batched: if"], FAULTS["ends-on-success: always"]
    make = variant(unbatched, ends=ending.ends)
    lines = str(check_goal_env(make())).splitlines()
    assert lines[0] == "Variant: 1 error, 0 warnings, 1 note (2,000 steps, 67 episodes)"
    found = [line.split(":")[0] for line in lines[1:] if not line.startswith(" ")]
    assert found == ["error ends-on-success", "note reward-not-batched"]
    assert max(map(len, lines)) <= 110
    assert all_names(check_goal_env(make(), ignore="ends-on-success")) == {"reward-not-batched"}
    assert all_names(check_goal_env(make(), ignore=["ends-on-success", "reward-not-batched"])) == set()


def test_an_environment_that_fails_is_reported_with_earlier_findings():
    report = check_goal_env(variant(FAULTS["step-fails: step"], reward_of_step=lambda *_: 5.0)())
    assert names(report.errors) == ["step-fails", "reward-differs"]
    assert "After 29 steps: step failed: RuntimeError: broken" in report.errors[0].message
    report = check_goal_env(showing(achieved_goal=lambda s: np.append(s.position, 0.0))())
    assert (names(report.errors), report.steps) == (["goal-shapes-differ"], 0)


def test_other_keys_and_a_goal_that_is_part_of_the_state():
    def observe(self):
        return {"robot": {"state": np.append(self.position, [0.0, self.time])}, "target": self.goal.copy()}

    def step(self, action):
        _, _, terminated, truncated, info = Reach.step(self, action)
        return observe(self), self.compute_reward(self.position, self.goal, {}), terminated, truncated, info

    env = variant(step=step, reset=lambda s, **options: (Reach.reset(s, **options), (observe(s), {}))[1])
    keys = HERKeys(achieved_goal=("robot", "state"), desired_goal="target")
    check = partial(check_goal_env, env(), keys=keys)
    assert all_names(check(goal_fn=lambda state: state[..., :2])) == set()
    assert "reward-differs" in names(check(goal_fn=lambda state: state[..., 1:3]).errors)
    (finding,) = check_goal_env(env()).errors
    assert finding.name == "not-a-goal-env"
    assert "a dict with entries [('robot', 'state'), 'target']." in finding.message


def test_the_reward_of_the_transform_is_checked():
    def all_with(env, reward):
        return all_names(check_goal_env(env, reward, steps=600))

    near = SparseReward(0.2, terminated_fn=lambda achieved, desired: (achieved - desired).norm(dim=-1) <= 0.2)
    never = SparseReward(0.2, terminated_fn=lambda achieved, desired: torch.zeros(len(achieved), dtype=torch.bool))
    ends = FAULTS["ends-on-success: always"]()
    paid = FAULTS["reward-needs-info: energy"]()
    assert all_with(Reach(), lambda a, d: -((a - d).norm(dim=-1) > 0.2).float()) == set()
    assert all_with(Reach(), SparseReward(0.1)) == {"reward-differs"}
    assert all_with(ends, near) == set()
    assert all_with(ends, never) == {"terminated-differs"}
    assert all_with(paid, EnvReward(paid, info_keys=[("next", "energy")])) == set()


def test_an_environment_is_accepted_in_any_form_and_closed_if_the_checker_creates_it():
    closed = []
    closing = variant(close=lambda self: closed.append(self))
    transformed = TransformedEnv(GymWrapper(closing()), StepCounter())
    for form in (closing(), transformed, gymnasium.wrappers.TimeLimit(closing(), 30)):
        report = check_goal_env(form, steps=100)
        assert (report.env, report.steps, report.errors) == ("Variant", 100, [])
    assert not closed
    assert check_goal_env(closing, steps=10).steps == 10
    assert len(closed) == 1


def test_the_same_seed_gives_the_same_report():
    noted = []
    noting = variant(step=lambda s, a: (noted.append(a), Reach.step(s, a))[1])
    one, two, _ = (str(check_goal_env(noting(), seed=seed, steps=300)) for seed in (0, 0, 1))
    actions = np.array(noted).reshape(3, 300, 2)
    assert one == two
    assert np.array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2])


def test_the_command_line_checks_any_id(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["torchrl_her", "check", *arguments, "--steps", "200"])
        return __main__.main()

    gymnasium.register("FaultyReach-v0", FAULTS["reward-differs: sign"])
    assert run("FaultyReach-v0") == 1
    assert "error reward-differs" in capsys.readouterr().out
    assert run("FaultyReach-v0", "--ignore", "reward-differs") == 0
    renamed = {"observation": "observation", "achieved_goal": "tip", "desired_goal": "target"}
    rename = lambda entries: {renamed[key]: entry for key, entry in entries.items()}  # noqa: E731
    space = gymnasium.spaces.Dict(rename(Reach().observation_space))
    make = lambda: gymnasium.wrappers.TransformObservation(Reach(), rename, space)  # noqa: E731
    gymnasium.register("Renamed-v0", make)
    assert run("Renamed-v0") == 1
    assert run("Renamed-v0", "--achieved-goal", "tip", "--desired-goal", "target") == 0
    with pytest.raises(SystemExit) as caught:
        run("Unknown-v0")
    assert caught.value.code == 1
    assert "Unknown" in capsys.readouterr().err


def test_the_module_can_be_run_and_takes_a_module_of_environments(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import gymnasium\nfrom torchrl_her.envs import PointReach\n"
        "gymnasium.spec('FetchReach-v4')  # known without an import\n"
        "class Mine(PointReach):\n    def compute_reward(self, achieved, desired, info): return 0.0\n"
        "gymnasium.register('Mine-v0', Mine, max_episode_steps=20)\n"
    )
    command = [sys.executable, "-m", "torchrl_her", "check", "mine:Mine-v0", "--steps", "300"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "error reward-constant: compute_reward returned 0 for all" in result.stdout
