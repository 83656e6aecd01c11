"""Plain data that every layer speaks: requests, parameters, drafts, verdicts, outputs, errors."""
