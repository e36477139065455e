"""`run --hostfile`: one agent on each host, through ssh."""
