"""Read examples/README.md first: these modules are shared by the training scripts, and contain no algorithm."""
