"""Headers, reservation and deadline of a request."""
