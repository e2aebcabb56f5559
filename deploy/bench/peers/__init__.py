"""Engines under measurement, each in a process of its own.

A peer may live in another Python with other packages: its module imports only the standard library, ``protocol``
and the engine itself.
"""
