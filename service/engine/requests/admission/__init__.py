"""How much work is in the service, whose it is, and when refused requests come back."""
