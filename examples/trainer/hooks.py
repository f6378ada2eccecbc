"""Hooks of TorchRL's trainers."""

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase, set_exploration_type
from torchrl.trainers import Trainer, TrainerHookBase

LONGEST_EPISODE = 10_000  # steps


class SuccessRate(TrainerHookBase):
    """Plays greedy episodes, always with the same starts and goals, and logs the share that ends at the goal.

    Args:
        env (EnvBase): the environment, or a batch of environments.
        policy (TensorDictModuleBase): the policy.
        reached (float): the reward of a step that ends at the goal. Smaller rewards are failures.
        interval (int): the frames from one evaluation to the next.
        episodes (int): the number of episodes.
        seed (int): the seed of starts and goals.
    """

    def __init__(
        self, env: EnvBase, policy: TensorDictModuleBase, *, reached: float, interval: int, episodes: int, seed: int
    ):
        self.env, self.policy, self.reached = env, policy, reached
        self.interval, self.episodes, self.seed = interval, episodes, seed
        self.evaluated = 0  # frames before the last evaluation

    @torch.no_grad()
    @set_exploration_type("DETERMINISTIC")
    def evaluate(self) -> float:
        """Return the share of successful episodes."""
        count = self.env.batch_size.numel()
        if self.episodes % count:
            raise ValueError(f"episodes={self.episodes} must be a multiple of the {count} environments.")
        self.env.set_seed(self.seed)
        successes = []
        for _ in range(0, self.episodes, count):
            steps = self.env.rollout(LONGEST_EPISODE, self.policy, break_when_all_done=True)
            successes.append(steps["next", "reward"][..., -1, :] >= self.reached)
        return torch.stack(successes).float().mean().item()

    def __call__(self, batch: object = None) -> dict[str, float] | None:
        if self.trainer.collected_frames - self.evaluated < self.interval:
            return None
        self.evaluated = self.trainer.collected_frames
        return {"success": self.evaluate(), "log_pbar": True}

    def register(self, trainer: Trainer, name: str = "success_rate") -> None:
        """Evaluate after the updates of a batch."""
        self.trainer = trainer
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, int]:
        """Return the number of frames before the last evaluation."""
        return {"evaluated": self.evaluated}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Load the result of `state_dict`."""
        self.evaluated = state_dict["evaluated"]
