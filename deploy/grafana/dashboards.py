"""All dashboards."""

from .autoscaling import SCALING
from .bus import BUS
from .replicas import REPLICAS
from .routing import ROUTING
from .service import SERVICE

DASHBOARDS = (SERVICE, ROUTING, REPLICAS, SCALING, BUS)
