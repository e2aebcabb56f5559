"""The printable characters by which byte-level BPE writes the 256 bytes (GPT-2's ``bytes_to_unicode``)."""


def _alphabet() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


BYTE_TO_CHAR = _alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}
