"""The engine as an HTTP service with OpenAI's interface: `slipstream serve`. See `docs/serving.md`."""
