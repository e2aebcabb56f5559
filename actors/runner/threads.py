"""How many threads compute."""

import torch

from ..kernels.library import native


def use_threads(wanted: int | None) -> int:
    """Set the threads that a model computes with, by default as many as there are; the number in use.

    Beside native kernels torch itself keeps to one thread: what is left to it is small, and its other threads would
    spin after each of its operations on the cores that the kernels need.
    """
    library = native()
    if library is None:
        if wanted is not None:
            torch.set_num_threads(wanted)
        return torch.get_num_threads()
    if wanted is not None:
        library.set_num_threads(wanted)
    torch.set_num_threads(1)
    return library.num_threads
