"""Speed of sampling and writing with hindsight, compared with plain replay and with other libraries.

    python benchmarks/speed.py                # all parts, in eight minutes and 7 GB of memory
    python benchmarks/speed.py sample groups --rounds 400

Each part prints its tables; ``docs/reference/results/speed.md`` has most of them. All contenders take turns within a
round, on one thread. Times are medians, and ratios are medians of the ratios within a round. Fails if a sampled
transition has a wrong goal or reward.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from inspect import signature

try:
    import frames
    import sampling
    import strategies
except ModuleNotFoundError as error:  # a library of `peers`
    sys.exit(f"{error.name} is missing. In a clone: make .venv/.benchmarks")
from measuring import set_up

PARTS: dict[str, Callable[..., None]] = {
    "sample": sampling.sample,
    "groups": sampling.groups,
    "write": sampling.write,
    "growth": sampling.growth,
    "frames": frames.frames,
    "share": frames.share,
    "strategies": strategies.strategies,
    "compiled": strategies.compiled,
}


def main() -> None:
    parts = "\n".join(f"  {name:<12}{function.__doc__}" for name, function in PARTS.items())
    description, form = f"{__doc__}\nparts:\n{parts}", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default: 150 to 1500, by part)")
    arguments = parser.parse_args()
    for name in arguments.parts or PARTS:
        set_up()
        given = {key: vars(arguments)[key] for key in signature(PARTS[name]).parameters}
        PARTS[name](**{key: value for key, value in given.items() if value is not None})


if __name__ == "__main__":
    main()
