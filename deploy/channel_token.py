"""The secret that opens the channels between ingresses and replicas: one for each Ray cluster.

It outlives what is deployed: while an application is renewed, ingresses and replicas of both releases must understand
each other. It lies beside what Ray itself keeps, where whoever may read it may do anything in the cluster.
"""

import secrets

import ray
from ray.experimental.internal_kv import (
    _internal_kv_get,  # pyright: ignore[reportPrivateUsage]
    _internal_kv_put,  # pyright: ignore[reportPrivateUsage]
)

_KEY, _NAMESPACE = "channel-token", "warmroot"


def channel_token() -> str:
    """The cluster's token, made by who asks first. Without a cluster, one that nobody else has."""
    made = secrets.token_hex(16)
    if not ray.is_initialized():
        return made
    _internal_kv_put(_KEY, made, overwrite=False, namespace=_NAMESPACE)
    return _internal_kv_get(_KEY, namespace=_NAMESPACE).decode()
