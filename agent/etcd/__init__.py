"""An etcd server of the agent's own."""
