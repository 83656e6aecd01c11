"""The computations that decide the speed of a pass, each with a plain torch form that defines its result."""
