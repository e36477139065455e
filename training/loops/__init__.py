"""Hooks for other projects' unmodified training loops: common part, Megatron-LM, Megatron-Bridge."""
