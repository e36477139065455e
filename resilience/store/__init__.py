"""What agents and the controller agree through: protocol, keys, codec, caches, election."""
