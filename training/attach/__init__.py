"""How a rank is tied to its agent: import hook, page of the board, signal that asks for stacks."""
