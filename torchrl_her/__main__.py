"""The command line: `python -m torchrl_her check FetchReach-v4` checks a goal environment."""

from __future__ import annotations

import argparse
import contextlib

import gymnasium

import torchrl_her.envs  # noqa: F401 (registers its environments)
from torchrl_her.goal_env_check.check import check_goal_env
from torchrl_her.keys import HERKeys

with contextlib.suppress(ImportError):  # registers its environments, if it is installed
    import gymnasium_robotics  # noqa: F401


def main() -> int:
    """Run the command line. Return the exit status: 1 if the report has errors, else 0."""
    parser = argparse.ArgumentParser(prog="python -m torchrl_her", description="Tools for goal environments.")
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="find mistakes in a goal environment before training")
    check.add_argument("env", help="id of a Gymnasium environment, such as FetchReach-v4 or module:Name-v0")
    for key in ("achieved_goal", "desired_goal"):
        check.add_argument(f"--{key.replace('_', '-')}", default=key, metavar="KEY", help="(default: %(default)s)")
    check.add_argument("--steps", type=int, help="number of steps to play (default: 2000, or as many as fit into 6 s)")
    check.add_argument("--seed", type=int, default=0, help="seed of the environment and the actions (default: 0)")
    check.add_argument(
        "--ignore", action="append", default=[], metavar="NAME", help="name of a finding to leave out; can be repeated"
    )
    arguments = parser.parse_args()
    keys = HERKeys(achieved_goal=arguments.achieved_goal, desired_goal=arguments.desired_goal)
    options = {"steps": arguments.steps, "seed": arguments.seed, "ignore": arguments.ignore}
    try:
        report = check_goal_env(arguments.env, keys=keys, **options)
    except (ValueError, ImportError, gymnasium.error.Error) as error:
        advice = (
            "To check an environment that your own module registers, pass module:Name-v0, with PYTHONPATH=its_folder."
        )
        parser.exit(1, f"{error}\n{advice}\n")
    print(report)
    return int(bool(report.errors))


if __name__ == "__main__":
    raise SystemExit(main())
