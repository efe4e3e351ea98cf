"""Passes over graphs that serving needs, one a file, and how passes are defined and found by name.

Others are in :mod:`fxcore.toolbox`, which nothing here imports; :mod:`fxcore.transforms` has all.
"""
