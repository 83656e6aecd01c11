"""How much to guess: what a pass costs, what a draft is likely to bring, and the size that pays best."""
