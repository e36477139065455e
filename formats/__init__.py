"""Snapshots as others know checkpoints: read by zarr-python, written and taken over as safetensors, torch's DCP and Megatron's."""
