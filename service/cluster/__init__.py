"""The service and bulk extraction on a Ray cluster. Needs the extra ``ray``."""
