"""The loops of others, unmodified: what their hooks share, Megatron-LM, Megatron-Bridge."""
