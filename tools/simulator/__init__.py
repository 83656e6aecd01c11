"""The serving engine played on recorded rounds and guesses, to judge planners without a GPU."""
