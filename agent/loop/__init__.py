"""The agent's loop: observe the ranks, publish the node's status, decide (if it leads), and obey the generation record."""
