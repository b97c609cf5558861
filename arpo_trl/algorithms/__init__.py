"""The algorithms as pure functions, one idea a file, each with the number of its equation.

ARPO is arXiv 2507.19849, AEPO is arXiv 2510.14545; `docs/equations.md` maps their equations to these functions. They run
on plain numbers, lists and tensors: nothing here knows a trainer, an engine or a file.
"""
