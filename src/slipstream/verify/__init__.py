"""Which nodes of a draft stand: `exact` accepts what equals the target's own choice."""
