"""Hooks for other projects' unmodified training loops: the common part, Megatron-LM, Megatron-Bridge."""
