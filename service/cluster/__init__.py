"""Beyond one machine: the same application and the same extraction on Ray. Needs the extra ``ray``."""
