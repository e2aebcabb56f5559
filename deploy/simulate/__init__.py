"""A cluster on a virtual clock: the production routing core and prefix index before simulated replicas."""
