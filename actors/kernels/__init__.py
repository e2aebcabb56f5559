"""The native core: C++ kernels for CPUs, optional, behind the same interfaces as torch's."""
