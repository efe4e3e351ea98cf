"""Access control: API keys, origins and allowed hosts."""
