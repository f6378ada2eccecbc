"""check_goal_env finds planted mistakes, and nothing in correct environments."""

import contextlib
import copy
import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.envs import GymWrapper, SerialEnv, StepCounter, TransformedEnv

from support.correct_goal_envs import CORRECT, Grid, Putt
from support.goal_envs import FAULTS, Dense, EndsOnSuccess, Reach, apart, observed, variant, with_energy
from torchrl_her import EnvReward, SparseReward, __main__, check_goal_env
from torchrl_her.diagnosis.goal_env.finding import NAMES, SEVERITIES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "check-goal-env.md"
ROBOTICS = [
    "FetchReach-v4",
    "FetchPush-v4",
    "FetchSlide-v4",
    "FetchPickAndPlace-v4",
    "FetchReachDense-v4",
    "HandReach-v3",
    "HandManipulateBlockRotateZ-v1",
    "HandManipulatePen-v1",
    "PointMaze_UMaze-v3",
    "PointMaze_LargeDense-v3",
    "AntMaze_UMaze-v5",
]


def names(found):
    return [finding.name for finding in found]


def all_names(report):
    return {*names(report.errors), *names(report.warnings), *names(report.notes)}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_environment_has_no_errors_and_no_warnings(name):
    report = check_goal_env(CORRECT[name](), steps=600)
    assert not report.errors
    assert not report.warnings
    assert ("achieved-goal-moves-late" in names(report.notes)) == ("explicit Euler" in name)
    assert report.steps == 600


def test_a_long_first_step_is_a_warning():
    report = check_goal_env(Putt(), steps=600)
    assert not report.errors
    assert names(report.warnings) == ["achieved-goal-jumps"]


@pytest.mark.parametrize("name", ROBOTICS)
def test_environments_of_gymnasium_robotics_are_correct(name):
    report = check_goal_env(name, steps=250)
    assert not report.errors
    assert not report.warnings
    assert set(names(report.notes)) <= {"no-goal-reached", "reward-not-batched"}
    assert ("reward-not-batched" in names(report.notes)) == ("Pen" in name)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found_and_is_the_first_error(fault):
    make, name = FAULTS[fault]
    report = check_goal_env(make(), steps=400)
    assert name in all_names(report)
    severity = next(severity for severity, listed in SEVERITIES.items() if name in listed)
    if severity == "error":
        assert set(names(report.errors)) <= {name, "step-fails"}
    else:
        assert not report.errors


def test_every_finding_is_tested_and_explained_on_the_page():
    page = PAGE.read_text()
    explained = set(re.findall(r"[a-z]+(?:-[a-z]+)+|\bendless\b", page)) & NAMES
    assert explained == NAMES
    headings = {name for line in re.findall(r"^### (.*)$", page, re.M) for name in line.split(", ")}
    assert headings <= NAMES
    assert {name.replace("terminated-", "reward-") for name in NAMES - headings} <= headings
    found = {name for _, name in FAULTS.values()} | headings
    assert {name.replace("terminated-", "reward-") for name in NAMES} <= found | {"reward-one-verdict"}


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ({"compute_terminated": lambda s, a, d, i: i["contact"]}, "terminated-fails"),
        ({"compute_terminated": lambda s, a, d, i: s.np_random.random() < 0.5}, "terminated-random"),
        ({"compute_terminated": lambda s, a, d, i: (apart(a, d) < 0.2) | (s.time > 30)}, "terminated-depends-on-state"),
        ({"compute_terminated": lambda s, a, d, i: apart(s.position, d) < 0.2}, "terminated-ignores-achieved-goal"),
        ({"compute_terminated": lambda s, a, d, i: i.get("ends", False)}, "terminated-needs-info"),
        (
            {"compute_terminated": lambda s, a, d, i: bool(np.subtract(a, d, out=a).any())},
            "terminated-modifies-arguments",
        ),
        (
            {"compute_terminated": lambda s, a, d, i: apart(a, d) < 0.2 if a.ndim == 1 else None},
            "terminated-not-batched",
        ),
    ],
)
def test_mistakes_in_compute_terminated_are_found(mistake, name):
    report = check_goal_env(variant(ends=lambda *_: False, **mistake)(), steps=500)
    assert name in all_names(report)
    assert not [found for found in all_names(report) if found.startswith("reward-")]


READS = {
    "pop": lambda info: info.pop("energy"),
    "setdefault": lambda info: info.setdefault("energy", 0.0),
    "popitem": lambda info: info.popitem(),
    "copy": lambda info: info.copy()["energy"],
    "copy.copy": lambda info: copy.copy(info)["energy"],
    "|": lambda info: (info | {})["energy"],
    "| on the right": lambda info: ({} | info)["energy"],
    "update": lambda info: {}.update(info),
    "unpacking": lambda info: {**info},
    "keys": lambda info: "energy" in info.keys(),  # noqa: SIM118
    "reversed": lambda info: list(reversed(info)),
    "==": lambda info: info == {},
    "json": json.dumps,
}


@pytest.mark.parametrize("way", READS)
def test_an_entry_of_info_is_found_however_it_is_read(way):
    reading = variant(
        compute_reward=lambda s, a, d, i: (READS[way](i), Reach.compute_reward(s, a, d, i))[1],
        reward_of_step=Reach.compute_reward,
        info=lambda s, a, d: {"energy": 0.1 * s.time},
    )
    report = check_goal_env(reading(), steps=60, ignore=["reward-not-batched", "no-goal-reached"])
    assert all_names(report) == {"reward-needs-info"}
    assert "reads 'energy' from info" in report.warnings[0].message


def test_a_function_that_reads_no_entry_of_info_is_silent():
    silent = variant(
        compute_reward=lambda s, a, d, i: Reach.compute_reward(s, a, d, i or {}),
        reward_of_step=Reach.compute_reward,
        info=lambda s, a, d: {"energy": 0.1 * s.time},
    )
    report = check_goal_env(silent(), steps=60, ignore=["reward-not-batched", "no-goal-reached"])
    assert not all_names(report)


@pytest.mark.parametrize("base", [Reach, Dense])
def test_a_time_limit_is_found_besides_an_end_on_success(base):
    limited = variant(
        EndsOnSuccess,
        compute_reward=base.compute_reward,
        ends=lambda s, a, d: bool(s.compute_terminated(a, d, {})) or s.time >= 40,
    )
    report = check_goal_env(limited(), steps=400)
    assert names(report.errors) == ["terminated-differs"]
    assert names(report.warnings) == ["time-limit-terminates"]
    assert "terminated after exactly 40 steps" in report.warnings[0].message


def test_a_threshold_is_compared_with_the_length_of_a_step():
    def numbers_and_note(**members):
        (note,) = check_goal_env(variant(**members)(), steps=600).notes
        return [
            float(number) for number in re.findall(r"(?:within about|by|by at most) ([\d.e-]+\d)", note.message)
        ], note

    (limit, median, largest), note = numbers_and_note(threshold=1e-6)
    assert limit == pytest.approx(1e-6, rel=1e-3)
    assert 0.1 < median < 0.2 < largest < 0.283
    assert "The threshold may be too small" in note.advice
    (limit, *_), note = numbers_and_note(draw_goal=lambda s: s.np_random.uniform(1.3, 1.4, 2))
    assert limit == pytest.approx(0.2, rel=1e-3)
    assert "threshold" not in note.advice
    for width, threshold in ((1 / 64, 0.0), (0.02, 1e-6)):  # grids, whose goals are reached exactly
        numbers, note = numbers_and_note(base=Grid, width=width, threshold=threshold)
        assert not numbers
        assert "threshold" not in note.advice


def test_ignored_findings_are_left_out():
    make = variant(FAULTS["ends on success"][0], compute_reward=FAULTS["not batched"][0].compute_reward)
    assert all_names(check_goal_env(make())) == {"ends-on-success", "reward-not-batched"}
    assert all_names(check_goal_env(make(), ignore="ends-on-success")) == {"reward-not-batched"}
    assert all_names(check_goal_env(make(), ignore=["ends-on-success", "reward-not-batched"])) == set()


# Messages


def test_a_finding_prints_the_numbers_that_show_it():
    faulty = variant(reward_of_step=lambda s, a, d, i: 10 * s.compute_reward(a, d, i) + 1)
    (finding,) = check_goal_env(faulty()).errors
    assert "step returned the reward -9 and compute_reward -1" in finding.message
    assert "10 times the other, plus 1." in finding.message
    (finding,) = check_goal_env(FAULTS["threshold"][0]()).errors
    by_step, by_function = map(
        float, re.search(r"a distance of ([\d.]+), compute_reward up to ([\d.]+)\.", finding.message).groups()
    )
    assert 0.05 < by_step <= 0.1 < by_function <= 0.2


def test_a_report_prints_its_findings_by_severity():
    report = check_goal_env(
        variant(compute_reward=FAULTS["not batched"][0].compute_reward, ends=FAULTS["ends on success"][0].ends)()
    )
    lines = str(report).splitlines()
    assert lines[0] == "Variant: 1 error, 0 warnings, 1 note (2,000 steps, 67 episodes)"
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")][1:] == [
        "error ends-on-success",
        "note reward-not-batched",
    ]
    assert max(map(len, lines)) <= 110


# Arguments


def test_other_keys_and_a_goal_that_is_part_of_the_state():
    class Own(Reach):
        def observe(self):
            state = np.append(self.position, [0.0, self.time])
            return {"robot": {"state": state}, "target": self.goal.copy()}

        def step(self, action):
            self.position = np.clip(self.position + 0.2 * action, -1, 1)
            self.time += 1
            return self.observe(), self.compute_reward(self.position, self.goal, {}), False, self.time >= 40, {}

    keys = {
        "achieved_goal_key": ("robot", "state"),
        "desired_goal_key": "target",
        "goal_fn": lambda state: state[..., :2],
    }
    assert all_names(check_goal_env(Own(), **keys)) == {"observation-outside-space"}
    wrong = check_goal_env(
        Own(), **keys | {"goal_fn": lambda state: state[..., 1:3]}, ignore="observation-outside-space"
    )
    assert "reward-differs" in names(wrong.errors)
    assert names(check_goal_env(Own()).errors) == ["not-a-goal-env"]
    assert "the entries ('robot', 'state'), 'target'." in check_goal_env(Own()).errors[0].message


def test_the_reward_of_the_transform_is_checked():
    assert all_names(check_goal_env(Reach(), lambda a, d: -((a - d).norm(dim=-1) > 0.2).float(), steps=600)) == set()
    assert names(check_goal_env(Reach(), SparseReward(0.1), steps=600).errors) == ["reward-differs"]
    ends = FAULTS["ends on success"][0]()
    near = SparseReward(0.2, terminated_fn=lambda achieved, desired: (achieved - desired).norm(dim=-1) <= 0.2)
    assert all_names(check_goal_env(ends, near, steps=600)) == set()
    never = SparseReward(0.2, terminated_fn=lambda achieved, desired: torch.zeros(len(achieved), dtype=torch.bool))
    assert names(check_goal_env(ends, never, steps=600).errors) == ["terminated-differs"]
    needs_info = variant(compute_reward=with_energy, info=lambda s, a, d: {"energy": 0.1 * s.time})()
    assert (
        all_names(check_goal_env(needs_info, EnvReward(needs_info, info_keys=[("next", "energy")]), steps=600)) == set()
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: Reach,
        Reach,
        lambda: GymWrapper(Reach()),
        lambda: TransformedEnv(GymWrapper(Reach()), StepCounter()),
        lambda: gymnasium.wrappers.TimeLimit(Reach(), 30),
    ],
    ids=["function", "environment", "TorchRL wrapper", "transformed", "wrapper"],
)
def test_an_environment_is_accepted_in_any_form(make):
    report = check_goal_env(make(), steps=100)
    assert (report.env, report.steps) == ("Reach", 100)
    assert not report.errors


def test_only_environments_that_the_checker_creates_are_closed():
    closed = []
    closing = variant(close=lambda self: closed.append(self))
    env = closing()
    check_goal_env(env, steps=10)
    assert not closed
    check_goal_env(closing, steps=10)
    assert len(closed) == 1


def test_the_same_seed_gives_the_same_report():
    noted = []
    noting = variant(step=lambda s, a: (noted.append(a), Reach.step(s, a))[1])
    one, two, other = (str(check_goal_env(noting(), seed=seed, steps=300)) for seed in (0, 0, 1))
    actions = np.array(noted).reshape(3, 300, 2)
    assert one == two
    assert np.array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2])
    assert other


def test_an_environment_that_fails_is_reported_with_earlier_findings():
    def step(self, action):
        if self.time == 30:
            raise RuntimeError("broken")
        return Reach.step(self, action)

    report = check_goal_env(variant(step=step, reward_of_step=lambda *a: 5.0)())
    assert names(report.errors) == ["step-fails", "reward-differs"]
    assert "RuntimeError: broken" in report.errors[0].message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ignore": ["reward-diff"]}, r"no finding \['reward-diff'\].*'reward-differs'"),
        ({"steps": 0}, "at least 1, got 0"),
        ({"steps": "100"}, "at least 1, got '100'"),
        ({"reward": lambda achieved: achieved}, "called with two arguments"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        check_goal_env(Reach(), **arguments)


def test_goals_of_other_kinds():
    pixels = variant(
        observe=lambda s: observed(
            s,
            achieved_goal=np.full((8, 8, 3), 100 * s.position[0] + 100, dtype=np.uint8),
            desired_goal=np.full((8, 8, 3), 100 * s.goal[0] + 100, dtype=np.uint8),
        ),
        compute_reward=lambda s, a, d, i: -(np.abs(a.astype(int) - d).mean((-1, -2, -3)) > 20).astype(float),
    )
    assert (
        all_names(check_goal_env(pixels(), steps=500, ignore=["observation-outside-space", "success-differs"])) == set()
    )
    numbers = variant(
        observe=lambda s: observed(s, achieved_goal=int(5 * s.position[0]), desired_goal=int(5 * s.goal[0])),
        compute_reward=lambda s, a, d, i: (np.asarray(a) == d) - 1.0,
        info=lambda *_: {},
    )
    assert all_names(check_goal_env(numbers(), steps=500, ignore=["observation-outside-space"])) <= {
        "achieved-goal-constant"
    }


@pytest.mark.parametrize(
    "env", [None, 3, SerialEnv(2, lambda: GymWrapper(Reach())), gymnasium.vector.SyncVectorEnv([Reach])]
)
def test_anything_but_a_single_environment_is_refused(env):
    with pytest.raises(TypeError, match="check_goal_env needs one Gymnasium environment"):
        check_goal_env(env)


def test_a_reset_that_fails_is_a_finding():
    report = check_goal_env(variant(reset=lambda self: None)())
    assert names(report.errors) == ["step-fails"]
    assert "reset failed: TypeError" in report.errors[0].message


def test_the_threshold_is_named_only_if_the_reward_has_one():
    def late(self, achieved, desired, info):
        before, self.before = getattr(self, "before", achieved), achieved
        return self.compute_reward(before, desired, info)

    (finding,) = check_goal_env(variant(reward_of_step=late)()).errors
    assert finding.name == "reward-differs"
    assert "up to a distance" not in finding.message


# The command line


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["torchrl_her", "check", *arguments])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = __main__.main()
    return status, printed.getvalue()


def test_the_command_line_checks_any_id(monkeypatch):
    gymnasium.register("FaultyReach-v0", FAULTS["sign"][0])
    status, printed = run(monkeypatch, "FaultyReach-v0", "--steps", "200")
    assert status == 1
    assert "error reward-differs" in printed
    assert run(monkeypatch, "FaultyReach-v0", "--steps", "200", "--ignore", "reward-differs")[0] == 0
    assert run(monkeypatch, "torchrl_her/PointReach-v0", "--steps", "200")[0] == 0


def test_the_command_line_reports_an_unknown_environment(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchrl_her", "check", "Unknown-v0"])
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 1
    assert "Unknown" in capsys.readouterr().err


def test_the_module_can_be_run_and_takes_a_module_of_environments(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import gymnasium\nfrom torchrl_her.envs import PointReach\n"
        "gymnasium.spec('FetchReach-v4')  # known without an import\n"
        "class Mine(PointReach):\n    def compute_reward(self, achieved, desired, info): return 0.0\n"
        "gymnasium.register('Mine-v0', Mine, max_episode_steps=20)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "torchrl_her", "check", "mine:Mine-v0", "--steps", "300"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "error reward-constant: compute_reward returned 0 for all" in result.stdout


def test_the_checker_issues_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_goal_env(Reach(), steps=200)
        check_goal_env(FAULTS["not batched"][0](), steps=200)
