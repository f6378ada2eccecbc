"""Hooks of TorchRL's trainers."""

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrl.envs import EnvBase, set_exploration_type
from torchrl.modules import AdditiveGaussianModule, EGreedyModule
from torchrl.trainers import Trainer, TrainerHookBase

LONGEST_EPISODE = 10_000  # steps


class SuccessRate(TrainerHookBase):
    """Plays greedy episodes, always with the same starts and goals, and logs the share that ends at the goal.

    Args:
        env (EnvBase): a batch of environments, ``[n]``.
        policy (TensorDictModuleBase): the policy.
        reached (float): the reward of a step that ends at the goal. Smaller rewards are failures.
        interval (int): the number of frames from one evaluation to the next.
        episodes (int): the number of episodes, a multiple of n.
        last_episodes (int): the number of episodes after the training, a multiple of n.
        seed (int): the seed of starts and goals.
        average (float): evaluates a moving average of the policy, in which the previous average has this weight after
            each update. Default: 0.0, the policy itself.
    """

    def __init__(
        self, env: EnvBase, policy: TensorDictModuleBase, *, reached: float, interval: int, episodes: int,
        last_episodes: int, seed: int, average: float = 0.0,
    ):  # fmt: skip
        self.env, self.policy, self.reached, self.seed = env, policy, reached, seed
        self.interval, self.episodes, self.last_episodes = interval, episodes, last_episodes
        self.average = AveragedModel(policy, multi_avg_fn=get_ema_multi_avg_fn(average)) if average else None
        self.evaluated = 0  # frames before the last evaluation

    @torch.no_grad()
    @set_exploration_type("DETERMINISTIC")
    def evaluate(self, episodes: int) -> float:
        """Return the share of successful episodes."""
        self.env.set_seed(self.seed)
        policy = self.average.module if self.average else self.policy
        rewards = []
        for _ in range(0, episodes, self.env.batch_size.numel()):
            steps = self.env.rollout(LONGEST_EPISODE, policy, break_when_all_done=True)
            rewards.append(steps["next", "reward"][:, -1])
        return (torch.cat(rewards) >= self.reached).float().mean().item()

    def __call__(self, batch: TensorDictBase | None) -> dict[str, Any] | None:
        """Return the success rate, if an evaluation is due."""
        if self.trainer.collected_frames - self.evaluated < self.interval:
            return None
        self.evaluated = self.trainer.collected_frames
        return {"success": self.evaluate(self.episodes), "log_pbar": True}

    def finish(self) -> None:
        """Print the success rate after the training."""
        success = self.evaluate(self.last_episodes)
        print(f"\n{self.trainer.collected_frames:,} frames: success {success:.2f} in {self.last_episodes} episodes")

    def register(self, trainer: Trainer, name: str = "success_rate") -> None:
        """Evaluate after the updates of a batch and after the training."""
        self.trainer = trainer
        trainer.register_op("post_steps_log", self)
        trainer.register_op("shutdown", self.finish)
        if self.average:
            trainer.register_op("post_optim", lambda: self.average.update_parameters(self.policy))
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of frames before the last evaluation."""
        return {"evaluated": self.evaluated, "average": self.average.state_dict() if self.average else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.evaluated = state_dict["evaluated"]
        if self.average:
            self.average.load_state_dict(state_dict["average"])


class RandomFrames(TrainerHookBase):
    """Writes the first frames, with random actions, to the buffer. Without it, TorchRL's trainers drop them."""

    def __call__(self, batch: TensorDictBase) -> None:
        """Write a batch that is not followed by updates."""
        if self.trainer.collected_frames + batch.numel() < self.trainer.collector.init_random_frames:
            self.trainer.replay_buffer.extend(batch.reshape(-1))

    def register(self, trainer: Trainer, name: str = "random_frames") -> None:
        """Write each batch before its updates."""
        self.trainer = trainer
        trainer.register_op("batch_process", self)


class Annealing(TrainerHookBase):
    """Reduces the exploration of the collector's policy by one step after each batch."""

    def __call__(self) -> None:
        """Reduce the exploration."""
        for module in self.trainer.collector.policy:
            if isinstance(module, AdditiveGaussianModule | EGreedyModule):
                module.step()

    def register(self, trainer: Trainer, name: str = "annealing") -> None:
        """Reduce the exploration after the updates of each batch."""
        self.trainer = trainer
        trainer.register_op("post_steps", self)
