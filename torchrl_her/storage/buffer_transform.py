"""The base of transforms that belong into a replay buffer."""

from __future__ import annotations

from torchrl.envs import EnvBase, Transform


class BufferTransform(Transform):
    """A transform of replay buffers, which refuses to be one of an environment."""

    def set_container(self, container: Transform | EnvBase) -> None:
        """Set the container, which must not be an environment."""
        super().set_container(container)
        if self.parent is not None:
            self.reset_parent()
            name = type(self).__name__
            raise ValueError(
                f"{name} is a transform of replay buffers and cannot be a transform of an environment: pass it to the "
                f"buffer, ReplayBuffer(transform={name}(...))."
            )
