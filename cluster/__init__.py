"""What the cluster is: ids, value types, errors, configuration, model facts and the capacity plan.

Pure Python: nothing here imports ray, torch or redis.
"""
