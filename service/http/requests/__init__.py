"""The headers, the reservation and the deadline of a request."""
