"""Train an agent with one of TorchRL's trainers: python examples/trainer/train.py --config-name sac_fetch_reach."""

import hydra
import torch
import torchrl.trainers.algorithms.configs  # noqa: F401  registers TorchRL's configs

import torchrl_her.configs
import torchrl_her.envs  # noqa: F401


@hydra.main(config_path="config", config_name="sac_fetch_reach", version_base="1.3")
def main(config):
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    env = hydra.utils.instantiate(config.env)
    env.fake_tensordict()  # sets the sizes of the inputs, which other processes need
    trainer = hydra.utils.instantiate(config.trainer)
    if config.resume:
        trainer.load_from_file(config.resume)
    trainer.train()


if __name__ == "__main__":  # processes import this file
    main()
