"""The few computations that decide the speed of a pass, each with a plain torch form that is always right."""
