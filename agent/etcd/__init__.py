"""The etcd server that an agent starts itself."""
