"""Who may ask, from where, and for what."""
