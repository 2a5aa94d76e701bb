"""Asynchronous RL post-training on FSDP2 with a versioned weight-state cache."""
