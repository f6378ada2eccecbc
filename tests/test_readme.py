"""The README's example runs as it is written."""

import itertools
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def example():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def test_the_example_runs_and_relabels(capsys):
    exec(example(), {})
    share, reached = map(int, re.findall(r"(\d+)%", capsys.readouterr().out))
    assert 60 <= share <= 95
    assert reached > 5  # without hindsight, a random policy reaches its goal in well under 5% of its steps


def test_the_example_can_be_pasted_into_a_prompt():
    """In a prompt a block ends with an empty line: none may be followed by code at once."""
    lines = example().splitlines()
    for before, line in itertools.pairwise(lines):
        ends_block = before.startswith("    ") and line and not line.startswith((" ", ")"))
        assert not ends_block, f"an empty line is missing before {line!r}"
