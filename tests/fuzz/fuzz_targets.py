"""All readers of bytes, by name."""

import fuzz_files
import fuzz_text
import fuzz_wire

TARGETS = {target.name: target for target in (*fuzz_wire.TARGETS, *fuzz_text.TARGETS, *fuzz_files.TARGETS)}
