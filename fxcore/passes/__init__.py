"""Graph passes that serving needs, one per file, and the means to define passes and find them by name.

Other passes are in :mod:`fxcore.toolbox`, which is not imported here. :mod:`fxcore.transforms` has all passes.
"""
