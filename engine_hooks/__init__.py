"""One folder an engine: the only code that knows that engine."""
