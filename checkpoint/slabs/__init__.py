"""A rank's payload ⇄ storage: zarr slabs, direct I/O, and what each rank of a node writes."""
