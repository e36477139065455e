"""Writes a rank's tensors to storage and reads them: zarr slabs, direct I/O, each rank's share."""
