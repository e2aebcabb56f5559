"""Checks of what is deployed, without a cluster: ``python -m warmroot.deploy.checks``, or ``make check-deploy``.

Each check returns what is wrong as lines of text; an empty list is a good one.
"""
