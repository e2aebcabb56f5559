"""What weights cost in memory: plain floats, and integers whose groups of columns share a scale."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """``bits`` per weight and, for each ``group`` of weights of a row, ``group_bytes`` of scales (group 1: none)."""

    name: str
    bits: int
    group: int = 1
    group_bytes: int = 0

    @property
    def is_quantised(self) -> bool:
        """Whether weights are integers with scales."""
        return self.group > 1

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of [rows, columns] weights."""
        groups = -(-columns // self.group) if self.is_quantised else 0
        return rows * (-(-columns * self.bits // 8) + groups * self.group_bytes)

    def vector_bytes(self, elements: int) -> int:
        """Bytes of norms, biases and routers, which stay floats: float32 beside quantised weights."""
        return elements * (4 if self.is_quantised else self.bits // 8)


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    fmt.name: fmt
    for fmt in (
        WeightFormat("float32", 32),
        WeightFormat("float16", 16),
        WeightFormat("bfloat16", 16),
        WeightFormat("q8_0", 8, 32, 2),
        WeightFormat("q5_0", 5, 32, 2),
        WeightFormat("q4_0", 4, 32, 2),
        WeightFormat("q4_1", 4, 32, 4),
        WeightFormat("q6_k", 6, 256, 18),
        WeightFormat("q5_k", 5, 256, 16),
        WeightFormat("q4_k", 4, 256, 16),
    )
}
"""Names and sizes of GGUF's blocks."""
