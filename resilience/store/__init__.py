"""The store that agents and the controller share: protocol, keys, codec, caches, election."""
