"""The contents of a snapshot: tensors, trees, images, manifests, fingerprints. Pure."""
