"""An engine in a process of its own: what serves requests does not take the interpreter from what computes answers."""
