"""Admission control: limits on the work in the service, fairness between clients, and retry times."""
