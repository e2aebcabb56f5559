"""How many threads compute."""

import torch

from ..kernels.library import native


def use_threads(wanted: int | None) -> int:
    """Set the threads of torch and of the native kernels, which take turns on the same cores; the number in use."""
    if wanted is not None:
        torch.set_num_threads(wanted)
    num_threads = torch.get_num_threads()
    library = native()
    if library is not None:
        library.set_num_threads(num_threads)
    return num_threads
