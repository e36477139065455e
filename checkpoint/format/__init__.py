"""What a snapshot consists of: tensors, trees, images, manifests, fingerprints. Pure."""
