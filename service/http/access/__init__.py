"""Access control: callers, API keys and allowed hosts."""
