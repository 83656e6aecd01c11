"""How many guesses each request's next draft gets. Plans change speed only, never tokens."""
