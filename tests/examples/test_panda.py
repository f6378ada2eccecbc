"""Tasks of panda-gym with episodes of fixed length."""

import gymnasium
import numpy as np
import pytest

pytest.importorskip("panda_gym", reason="needs panda-gym")

import panda  # noqa: F401 (registers the tasks)


@pytest.mark.parametrize("task", ["PandaReach", "PandaPush", "PandaSlide", "PandaPickAndPlace"])
def test_an_episode_has_50_steps_and_goes_on_at_the_goal(task):
    env = gymnasium.make(f"panda:{task}Fixed-v3")
    observation, _ = env.reset(seed=0)
    env.unwrapped.task.goal = observation["achieved_goal"]  # reached from the start
    for step in range(1, 51):
        _, reward, terminated, truncated, info = env.step(np.zeros(env.action_space.shape, dtype=np.float32))
        assert (terminated, truncated) == (False, step == 50)
        assert reward == 0.0
        assert info["is_success"]
    env.close()
