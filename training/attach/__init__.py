"""How a rank is tied to its agent: the import hook, its page of the board, its signal for stacks."""
