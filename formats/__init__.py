"""Snapshots in other programs' formats: read by zarr-python, exported to safetensors and torch's DCP, imported from DCP and Megatron."""
