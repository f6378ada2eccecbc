"""The scripts train on the environment of the tutorial, as how-to/training-scripts.md says."""

import doctest
import os
import re
import shlex
import subprocess
import sys

from script_runs import EXAMPLES, logged

from support.pages import DOCS, python_blocks


def test_the_command_of_the_page_trains_on_the_cart(tmp_path):
    tutorial = doctest.DocTestParser().get_examples((DOCS / "tutorials/your-own-environment.md").read_text())
    wanted = ("import gymnasium", "import numpy", "from gymnasium", "class Cart")
    cart = [example.source for example in tutorial if example.source.startswith(wanted)]
    (tmp_path / "cart.py").write_text("".join(cart) + python_blocks("how-to/training-scripts")[0])

    page = (DOCS / "how-to/training-scripts.md").read_text()
    command = re.search(r"PYTHONPATH=\. python examples/dqn\.py (.*?)\n```", page, re.DOTALL)[1]
    overrides = shlex.split(command.replace("\\\n", ""))
    assert len(overrides) == 7
    done = subprocess.run(
        [sys.executable, EXAMPLES / "dqn.py", *overrides, "total_steps=1000", "evaluation.interval=1000"],
        capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": "."}, timeout=600, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert "1,000 steps: success" in done.stdout.splitlines()[-1]
    (folder,) = (tmp_path / "outputs/dqn/cart:Cart-v0").iterdir()
    step, distance = logged(folder, "evaluation/distance")[-1]
    assert step == 1000
    assert 0 < distance < 2  # between positions of the cart, from -1 to 1
